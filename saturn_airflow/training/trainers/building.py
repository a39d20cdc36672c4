"""A job's ``Trainer`` as people have it: what of its arguments Saturn decides, and what it refuses."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.utils.data import IterableDataset
from transformers import Trainer
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from saturn_airflow.launch.users_code import of_the_job
from saturn_airflow.model.errors import JobError
from saturn_airflow.model.jobs import Job
from saturn_airflow.training import rng
from saturn_airflow.training.guarding.users_state import UsersState
from saturn_airflow.training.loading import made
from saturn_airflow.training.trainers import batch_order, seen_state
from saturn_airflow.training.trainers.fetch_randomness import can_be_followed, set_states, states

#: Arguments that can't be had, by what to do instead.
_REFUSED = {
    "auto_find_batch_size": "it changes the batch, which must not depend on a device's memory",
    "dataloader_persistent_workers": "they go on in an order that a resumed training would draw anew",
    "deepspeed": "a Trainer trains on one device here; give its model to a plain Job for more",
    "fsdp": "a Trainer trains on one device here; give its model to a plain Job for more",
    "ignore_data_skip": "a resumed training would see other batches",
    "push_to_hub": "each of its trainings would push; push the finished model from a task behind the sweep",
    "save_only_model": "nothing could be resumed",
}
# Samples that a collator is tried on.
_SAMPLES = 8


def build(job: Job, folder: Path) -> tuple[Trainer, list[str]]:
    """The job's trainer, which writes to ``folder``, and what :func:`batch_order.check` told of it.

    :raises JobError: when the function returns none, or one that can't be trained exactly.
    """
    rng.seed(job.hparams.seed, "model")
    what = f"load_model {job.load_model!r}"
    with of_the_job(what):
        trainer = made(job)
    if not isinstance(trainer, Trainer):
        raise JobError(f"{what} returned a {type(trainer).__name__}, not a Trainer (trainer=True)")
    args = trainer.args
    for name, why in _REFUSED.items():
        if getattr(args, name, None):
            raise JobError(f"TrainingArguments({name}={getattr(args, name)!r}) can't be had: {why}")
    if args.n_gpu > 1:
        raise JobError(f"{args.n_gpu} GPUs are visible, and a Trainer would share its batches out over them")
    args.output_dir = str(folder)
    args.disable_tqdm = True
    # One to be resumed from, until the next is whole; the best may be neither.
    args.save_total_limit = max(3 if args.metric_for_best_model else 2, args.save_total_limit or 2)
    for callback in list(trainer.callback_handler.callbacks):
        ours = type(callback).__module__.startswith("transformers.integrations")
        if ours or type(callback) in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(callback)
    with rng_unchanged(), of_the_job("the Trainer's data"):
        counted = _check_data(job, trainer)
    return trainer, counted


def batches_per_epoch(trainer: Trainer, batches: int) -> int:
    """Optimizer steps in an epoch of so many batches of its data loader."""
    return max(1, -(-batches // trainer.args.gradient_accumulation_steps))


def _check_data(job: Job, trainer: Trainer) -> list[str]:
    data: Any = trainer.train_dataset
    if data is None or isinstance(data, IterableDataset):
        raise JobError(
            "the Trainer's train_dataset has no length, and can't be resumed exactly; give its model and an "
            "iterable load_dataloader to a plain Job"
        )
    args: Any = trainer.args
    if args.accelerator_config.dispatch_batches:
        raise JobError(
            "accelerator_config's dispatch_batches can't be had: a resumed training would see other batches"
        )
    loader: Any = trainer.get_train_dataloader()
    counted = batch_order.check(trainer, loader)
    _check_samples(job, trainer, loader)
    _check_told(job, trainer, loader)
    return counted


def _check_samples(job: Job, trainer: Trainer, loader: Any) -> None:
    """Try some samples, and leave the data as they were."""
    before, collate, collator = states(), loader.collate_fn, trainer.data_collator
    with contextlib.suppress(Exception):  # one of a library's may count what it is called for
        collate, collator = copy.deepcopy((collate, collator))
    model: Any = trainer.model
    remembered = UsersState(job, model, beside=[trainer.train_dataset, loader.collate_fn])
    for _ in range(2):  # what is opened or kept with the first samples is there for the second
        seen = seen_state.of_data(trainer, job, collator)
        collate([loader.dataset[index] for index in range(min(_SAMPLES, len(loader.dataset)))])
    changed = seen_state.differing(seen, seen_state.of_data(trainer, job, collator))
    with contextlib.suppress(JobError):  # what is too large to be put back is no counter
        remembered.restore()
    if not _same(before, states()) and not can_be_followed(loader):
        raise JobError(
            "the Trainer's dataset or data_collator draws random numbers, which a resumed Trainer would draw "
            "anew where other processes fetch samples, or a batch sampler of its own chooses them; set "
            "dataloader_num_workers=0 and let the Trainer choose, or give the model and a load_dataloader to "
            "a plain Job, whose samples have random numbers of their own"
        )
    if changed:
        raise JobError(
            f"{', '.join(changed[:3])} of the Trainer's data changes as samples are read, of which a resumed "
            "Trainer reads fewer or others; have samples depend on their index alone and draw from the "
            "global generators of torch, numpy or Python, or give the model and a load_dataloader to a plain "
            "Job"
        )


def _check_told(job: Job, trainer: Trainer, loader: Any) -> None:
    """Tell the data of some epochs, and leave them as they were.

    :raises JobError: when they follow from more than the epoch that they are told last.
    """
    data = loader.dataset
    if not hasattr(loader, "set_epoch") or not hasattr(data, "set_epoch"):
        return
    remembered = UsersState(job, trainer.model, beside=[data])  # type: ignore[arg-type]
    seen = []
    for epochs in ((0, 1, 2), (0, 2)):
        for epoch in epochs:
            data.set_epoch(epoch)
        seen.append(seen_state.of_parts({"train_dataset": data}, trainer))
    with contextlib.suppress(JobError):  # what is too large to be put back
        remembered.restore()
    if changed := seen_state.differing(*seen):
        raise JobError(
            f"{', '.join(changed[:3])} follows from more than the last set_epoch(epoch) of the Trainer's "
            "dataset: a resumed Trainer tells it the epoch that it goes on in, and none before. Let all "
            "follow from the epoch, such as by a generator with the epoch as its seed"
        )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(np.array_equal(one, other))


@contextmanager
def rng_unchanged() -> Iterator[None]:
    """Around what must not move the random numbers of the training."""
    before = states()
    try:
        yield
    finally:
        set_states(before)


def leave_process_group() -> None:
    """Leave the group of the ranks: a Trainer would train as a part of it."""
    if dist.is_initialized():
        dist.destroy_process_group()
