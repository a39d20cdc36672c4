"""Jobs that bring a ``Trainer`` of Hugging Face's transformers: what else they may say, which is little."""

from __future__ import annotations

import dataclasses
from typing import Any

from saturn_airflow.model.errors import InvalidSweepError

#: What a job that brings its trainer has no use for.
_OF_TRAINERS = (
    *("load_dataloader", "loss_function", "data_args", "load_eval_dataloader", "metrics", "batch_dim"),
    *("couples_batch", "own_step", "on_step", "on_epoch", "init_from"),
)


def check(job: Any, hparams: Any, none: Any) -> None:
    """Check that a job has its data, or a trainer that has all of it.

    :param hparams: the job's hyper-parameters.
    :param none: those of a job that says none.
    :raises InvalidSweepError: naming the job and what it says too much or too little.
    """
    what = f"job {job.name!r}"
    if not isinstance(job.trainer, bool):
        raise InvalidSweepError(f"{what}: trainer is {job.trainer!r}; it must be True or False")
    if not job.trainer:
        if not job.load_dataloader:
            raise InvalidSweepError(f"{what}: give load_dataloader, which returns the job's data")
        return
    if given := [name for name in _OF_TRAINERS if getattr(job, name)]:
        raise InvalidSweepError(
            f"{what}: trainer=True leaves nothing to {given[0]}; say it in the function that makes the "
            "Trainer, or in its TrainingArguments"
        )
    names = (f.name for f in dataclasses.fields(hparams))
    if changed := [name for name in names if getattr(hparams, name) != getattr(none, name)]:
        raise InvalidSweepError(
            f"{what}: trainer=True leaves nothing to the hyper-parameter {changed[0]}; say it in "
            "TrainingArguments, and vary it in a grid as a key of model_args"
        )
