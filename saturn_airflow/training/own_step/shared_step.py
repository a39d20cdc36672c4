"""A step of the model's own that ranks take together, each on its share of the batch."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from saturn_airflow.parallelism.own_step_replicas import OwnStepReplicas
from saturn_airflow.parallelism.parallel import Parallel
from saturn_airflow.training.batches import GlobalBatch
from saturn_airflow.training.own_step.user_step import OwnStep, StepResult


def take(
    own: OwnStep, parallel: Parallel, batch: GlobalBatch, *, schedule: bool
) -> tuple[float, dict[str, float]]:
    """Take the step on this rank's share of ``batch``, together with the others.

    :param schedule: whether schedulers are stepped, and the step counts for them.
    :returns: the loss and what was logged, means over the batch.
    """
    (micro_batch,) = batch.micro_batches
    with _sharing(parallel, micro_batch.samples, batch):
        taken = own.take(micro_batch.data, batch.position.batch, schedule=schedule)
    return _means(parallel, taken)


@contextmanager
def _sharing(parallel: Parallel, samples: int, of: GlobalBatch) -> Iterator[None]:
    """Around a step in which this rank computes ``samples`` of a batch."""
    if not isinstance(parallel, OwnStepReplicas):
        yield
        return
    parallel.begin(samples, of.samples, of.turned)
    try:
        yield
    finally:
        parallel.end()


def _means(parallel: Parallel, taken: StepResult) -> tuple[float, dict[str, float]]:
    """The loss, and what was logged, as means over the batch; every rank calls this together.

    A number that only some ranks logged, as where a step logs what it finds in its samples, is the mean over
    their samples.
    """
    names = sorted(taken.logged)
    loss = _part(parallel, taken.loss)
    logged = [_part(parallel, taken.logged[name]) for name in names]
    if parallel.ranks.size == 1:
        return float(loss), {name: float(value) for name, value in zip(names, logged, strict=True)}
    mark = zlib.crc32("\n".join(names).encode()) % 2**20
    told = torch.stack([loss, *(torch.full_like(loss, number) for number in (mark, mark**2))])
    if isinstance(parallel, OwnStepReplicas):
        told = parallel.sum_of(told, of_step=True)
    else:
        dist.all_reduce(told)
    mean, marks, squares = told.tolist()
    if marks**2 != squares * parallel.ranks.size:  # they are the same only if all marks are
        return mean, _means_of_some(parallel, dict(zip(names, logged, strict=True)))
    if names:
        values = torch.stack(logged)
        dist.all_reduce(values)
        return mean, dict(zip(names, values.tolist(), strict=True))
    return mean, {}


def _means_of_some(parallel: Parallel, parts: dict[str, torch.Tensor]) -> dict[str, float]:
    weight = float(_part(parallel, torch.ones(())))
    here = {name: (float(part), weight) for name, part in parts.items() if weight}
    everyones = parallel.ranks.everyones(here)
    found = {}
    for name in sorted({name for there in everyones for name in there}):
        total, of = (sum(two) for two in zip(*(t[name] for t in everyones if name in t), strict=True))
        found[name] = total / of
    return found


def _part(parallel: Parallel, value: torch.Tensor) -> torch.Tensor:
    if isinstance(parallel, OwnStepReplicas):
        return parallel.part(value)
    return value.detach().to(parallel.ranks.device, torch.float64)
