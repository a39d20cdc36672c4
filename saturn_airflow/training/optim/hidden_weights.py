"""Schedulers see the optimizer without its weights: a schedule is a function of the number of steps.

A resume goes through the steps again, and a device may have only part of the weights, so what a scheduler
reads of weights, gradients, or what the optimizer keeps of them, would be something else there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from saturn_airflow.model.errors import JobError


class _Hidden:
    """In the place of a parameter."""

    def __init__(self, scheduler: str) -> None:
        self._scheduler = scheduler

    def __getattr__(self, name: str) -> NoReturn:
        raise _refusal(self._scheduler, f"{name!r} of the optimizer's parameters")


class _HiddenState(_Hidden):
    """In the place of what the optimizer keeps."""

    def __getattr__(self, name: str) -> NoReturn:
        raise _refusal(self._scheduler, "the optimizer's state")

    def _refuse(self, *args: Any) -> NoReturn:
        raise _refusal(self._scheduler, "the optimizer's state")

    __getitem__ = __setitem__ = __delitem__ = __iter__ = __len__ = __contains__ = __bool__ = _refuse


def _refusal(scheduler: str, what: str) -> JobError:
    return JobError(
        f"{scheduler} reads {what}, and a schedule depends on the number of steps alone. Let the optimizer "
        "do this, or give the model a training_step of its own"
    )


@contextmanager
def hidden_weights(optimizer: torch.optim.Optimizer, scheduler: str) -> Iterator[None]:
    """While a scheduler of ``optimizer`` is made, or steps.

    :param scheduler: what messages call it.
    :raises JobError: when something is read of a parameter, or of what the optimizer keeps.
    """
    parameters: list[list[Any]] = []
    for group in optimizer.param_groups:
        parameters.append(group["params"])
        group["params"] = [_Hidden(scheduler) for _ in group["params"]]
    state = optimizer.state
    optimizer.state = _HiddenState(scheduler)  # type: ignore[assignment]
    try:
        yield
    finally:
        optimizer.state = state
        for group, known in zip(optimizer.param_groups, parameters, strict=True):
            group["params"] = known
