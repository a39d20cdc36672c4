"""Pairs that a loss function returns: ``(sum, count)``, or a mean beside a metric, such as an accuracy?"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import torch

from saturn_airflow.launch import failures
from saturn_airflow.model.errors import JobError
from saturn_airflow.model.jobs import Job
from saturn_airflow.parallelism.module_state import ModuleState
from saturn_airflow.training.batches import Data, GlobalBatch
from saturn_airflow.training.guarding.plain import PlainLoop, Step
from saturn_airflow.training.guarding.randomness import without_randomness
from saturn_airflow.training.guarding.users_state import UsersState
from saturn_airflow.training.layout import MicroBatch
from saturn_airflow.training.losses.decompose import is_near
from saturn_airflow.training.nested import copied

_EPSILON = 2.0**-23  # of float32: in coarser formats nothing is found out


def refuse_means(job: Job, loop: PlainLoop, step: Step, data: Data, batches: Iterable[GlobalBatch]) -> None:
    """Refuse a mean beside another one, where the first is trained on divided by the second.

    Sums of a batch are what those of its parts add up to, and so is a count, however small; means are the
    means of the parts'. What is 0 is both, and who divides by 1 gets what is meant.

    :param step: one that ``loop`` has taken.
    :raises JobError: with what to return instead.
    """
    if step.counted is None or job.couples_batch:
        return
    whole_ones = (batch.micro_batches[0] for batch in batches if len(batch.micro_batches) == 1)
    for batch in whole_ones:
        if batch.samples < 2:
            continue
        with (
            without_randomness(),
            torch.no_grad(),
            UsersState(job, loop.model).put_back(),
            ModuleState(loop.model.modules()).put_back(),
        ):
            loop.model.eval()
            try:
                total, count = _pair(loop, batch)
                parts = [
                    (part.samples / batch.samples, *_pair(loop, part)) for part in _parts_of(batch, data)
                ]
            except Exception as error:
                if failures.is_of_the_machine(error):
                    raise
                continue  # such as a batch that can't be cut
        means = [sum(share * part[i] for share, *part in parts) for i in (0, 1)]
        if total and count not in (0.0, 1.0) and _are_near(means, (total, count)):
            raise JobError(
                f"loss_function {job.loss_function!r} returned a pair of means ({total:.6g}, {count:.6g}); "
                "of a pair (sum, count) a job trains on the first divided by the second. If the second is an "
                "accuracy or another metric, return the loss alone, and name the metric in Job(metrics=...); "
                "if both are means over the same samples, return their sums"
            )


def _parts_of(batch: MicroBatch, data: Data) -> list[MicroBatch]:
    """Its first sample, another one, and the rest."""
    ends = sorted({0, 1, min(2, batch.samples - 1), batch.samples})
    return [data.layout.take(batch.data, batch.samples, range(*both)) for both in pairwise(ends)]


def _pair(loop: PlainLoop, batch: MicroBatch) -> tuple[float, float]:
    """Both parts of the pair; a batch that the model writes into is copied before."""
    mean, count = loop.loss(copied(batch.data))
    assert count is not None, "the loss function returned a pair before"
    return float(mean) * count, count


def _are_near(ones: Iterable[float], others: Iterable[float]) -> bool:
    return all(is_near(one, other, _EPSILON) for one, other in zip(ones, others, strict=True))
