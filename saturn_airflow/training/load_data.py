"""Loading a job's data."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler

from saturn_airflow.launch import handed_over, job_log
from saturn_airflow.launch.users_code import of_the_job
from saturn_airflow.model import references
from saturn_airflow.model.errors import JobError
from saturn_airflow.model.jobs import Job
from saturn_airflow.model.references import Reference
from saturn_airflow.training import given_order, rng
from saturn_airflow.training.batches import Data
from saturn_airflow.training.data_state import DataState
from saturn_airflow.training.loaders import is_table, ordered, samples_stand_alone
from saturn_airflow.training.ranks import Ranks
from saturn_airflow.training.streams import Stream
from saturn_airflow.training.tables import Table
from saturn_airflow.training.without_group import without_group


def load_data(
    job: Job, reference: Reference, ranks: Ranks | None = None, *, in_order: bool = False, here: bool = False
) -> Data:
    """The data that ``reference`` (the job's ``load_dataloader`` or ``load_eval_dataloader``) loads.

    :param ranks: who loads it together.
    :param in_order: leave samples in the dataset's order even where the dataloader shuffles.
    :param here: let no workers fetch samples, where those by index can be fetched by anybody.
    :raises JobError: when what it returns is empty or can't be used, or ranks would shuffle it otherwise.
    """
    name, seed = str(reference), job.hparams.seed
    function = references.load(name)
    as_at_first = DataState(function).snapshot()

    def make() -> Any:
        as_at_first()
        rng.seed(seed, "data")
        arguments = handed_over.arguments(job.data_args, "data_args")
        if job.hparams.batch_size is not None and _takes(function, "batch_size"):
            arguments.setdefault("batch_size", job.hparams.batch_size)
        with of_the_job(repr(name)), job_log.loading(), without_group():
            return function(**arguments)

    loader = make()
    if isinstance(loader, DataLoader) and isinstance(loader.sampler, DistributedSampler):
        raise JobError(f"{name!r} uses a DistributedSampler; leave it out, Saturn shares the batches itself")
    if ranks is not None and ranks.size > 1:
        given_order.refuse_begun_otherwise(loader, ranks)
    if is_table(loader):
        if here:
            loader.num_workers, loader.prefetch_factor, loader.timeout = 0, None, 0
        if not len(loader.dataset) or samples_stand_alone(loader, seed):
            return Table(loader, job, name, in_order)
        return Stream(ordered(make(), job, in_order), lambda: ordered(make(), job, in_order), job, name)
    if not isinstance(loader, Iterable):
        raise JobError(
            f"{name!r} returned a {type(loader).__name__}; return a DataLoader or an iterable of batches"
        )
    stream = Stream(loader, make, job, name)
    if not in_order and not (_takes(function, "batch_size") and "batch_size" not in job.data_args):
        _check_size(stream, loader, job, name)
    return stream


def _check_size(stream: Stream, loader: Any, job: Job, name: str) -> None:
    """Check that batches which nobody told how large to be are as large as the job says.

    :raises JobError: where they are not.
    """
    wanted = job.hparams.batch_size
    if wanted is None:
        return
    known = [getattr(part, "batch_size", None) for part in (loader, getattr(loader, "batch_sampler", None))]
    found = next((size for size in known if isinstance(size, int)), None) or stream.first().samples
    if found != wanted:
        raise JobError(
            f"hparams: batch_size is {wanted}, which changes nothing: {name!r} does not get it, and what it "
            f"returns makes batches by itself, of {found} samples; let the function take batch_size, give it "
            "no other in data_args, or leave it out of the hyper-parameters"
        )


def _takes(function: Any, name: str) -> bool:
    parameters: Mapping[str, inspect.Parameter] = inspect.signature(function).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
