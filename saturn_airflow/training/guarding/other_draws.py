"""What other random numbers change of a step: its loss, or its gradients alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from saturn_airflow.launch import failures
from saturn_airflow.model.jobs import Job
from saturn_airflow.parallelism.module_state import ModuleState
from saturn_airflow.training import rng
from saturn_airflow.training.guarding.own_plain import OwnPlainLoop
from saturn_airflow.training.guarding.plain import PlainLoop
from saturn_airflow.training.guarding.samples import Samples
from saturn_airflow.training.guarding.users_state import UsersState
from saturn_airflow.training.nested import copied


def loss_drawn_otherwise(job: Job, loop: PlainLoop | OwnPlainLoop, batch: Any) -> float:
    """The loss of a batch with other random numbers than a step on it draws."""
    with _drawn(job, loop, "drawn otherwise"):
        if isinstance(loop, OwnPlainLoop):
            return float(loop.loss(copied(batch))[0].detach())
        with torch.no_grad():
            return loop.loss_of(loop.model, copied(batch))


def change_gradients(job: Job, loop: PlainLoop | OwnPlainLoop, batch: Any) -> bool:
    """Whether other random numbers change the gradients of a batch, or that can't be told.

    Dropout before an adapter whose second matrix begins at zero changes no loss, and that matrix's gradient.
    """
    taken: list[Sequence[Samples]] = []
    for what in ("drawn", "drawn", "drawn otherwise"):
        with _drawn(job, loop, what):
            try:
                taken.append(loop.unclipped(copied(batch), 1.0)[1])
            except Exception as error:
                if failures.is_of_the_machine(error):
                    raise
                return True
    if len({len(passes) for passes in taken}) > 1:
        return True
    return any(_differ(*passes) for passes in zip(*taken, strict=True))


def _differ(one: Samples, again: Samples, other: Samples) -> bool:
    """Whether ``other`` is further from ``one`` than what is computed ``again``, as on a GPU that adds up in
    any order."""
    for name, gradient in one.items():
        same, found = again.get(name), other.get(name)
        if gradient is None or same is None or found is None:
            if not gradient is same is found:
                return True
        elif not gradient.distance(found) <= 10 * gradient.distance(same):
            return True
    return False


@contextmanager
def _drawn(job: Job, loop: PlainLoop | OwnPlainLoop, what: str) -> Iterator[None]:
    """With random numbers of their own; the job's code and its model are as before afterwards."""
    with UsersState(job, loop.model).put_back(), ModuleState(loop.model.modules()).put_back():
        rng.seed(job.hparams.seed, what)
        yield
