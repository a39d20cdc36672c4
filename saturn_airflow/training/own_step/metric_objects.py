"""Metric objects that are parts of a model, such as those of torchmetrics, and what it logs of them.

On every device they come to what they would come to on one: while training each is shown the whole batch,
and in an evaluation each device sees all of the data. So they have nothing to exchange with the others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from saturn_airflow.launch.request import DoesNotFit
from saturn_airflow.launch.users_code import of_the_job
from saturn_airflow.model.errors import JobError
from saturn_airflow.training.whole_batch import is_shared, whole_batch

# What an ``update`` may be given besides rows, as it is the same on all devices.
_SAME_EVERYWHERE = (str, bool, type(None))


def is_metric(value: object) -> bool:
    """Whether ``value`` has what a metric object has; some modules answer to any name (diffusers)."""
    methods = (inspect.getattr_static(value, name, None) for name in ("update", "compute", "reset"))
    return not isinstance(value, torch.Tensor | type) and all(map(callable, methods))


class MetricObjects:
    """The metric objects of ``model``.

    :param devices: how many share the batches that it is trained on.
    """

    def __init__(self, model: nn.Module, devices: int) -> None:
        self._parts = {name: module for name, module in model.named_modules() if name and is_metric(module)}
        #: What was logged of this epoch's training or evaluation: by its name which part, and whether what it
        #: comes to at the end is logged.
        self.logged: dict[str, tuple[str, bool]] = {}
        for name, metric in self._parts.items():
            if hasattr(metric, "distributed_available_fn"):
                setattr(metric, "distributed_available_fn", _nobody)  # noqa: B010
            if devices > 1 and not isinstance(metric.update, _OnWholeBatches):
                setattr(metric, "update", _OnWholeBatches(name, metric.update))  # noqa: B010

    def __bool__(self) -> bool:
        return bool(self._parts)

    def log(self, name: str, metric: Any, at_end: bool) -> None:
        """Note that ``metric`` was logged, which is reset when the epoch or evaluation ends.

        :raises JobError: when it is no part of the model.
        """
        part = next((part for part, module in self._parts.items() if module is metric), None)
        if part is None:
            raise JobError(
                f"self.log({name!r}) was given a {type(metric).__name__} that is no part of the model; make "
                "it a torch.nn.Module, and an attribute of the model"
            )
        self.logged[name] = (part, at_end)

    def end(self) -> dict[str, torch.Tensor]:
        """What was logged comes to, at the end of an epoch or an evaluation; it begins anew."""
        logged, self.logged = self.logged, {}
        found = {}
        for name, (part, at_end) in logged.items():
            if at_end:
                with of_the_job(f"{part}: compute"):
                    found[name] = number(self._parts[part].compute(), name)
        for part in {part for part, _ in logged.values()}:
            with of_the_job(f"{part}: reset"):
                self._parts[part].reset()
        return found


def of_batch(name: str, metric: Any) -> torch.Tensor:
    """What ``metric``, logged as ``name``, came to on the batch that it was called with.

    :raises JobError: when it was not.
    """
    value = getattr(metric, "_forward_cache", None)
    if value is None:
        raise JobError(
            f"self.log({name!r}) was given a {type(metric).__name__} that has no value of this batch: call "
            "it itself, not its update, or log it with on_step=False, on_epoch=True"
        )
    return number(value, name)


def number(value: Any, name: str) -> torch.Tensor:
    """A number that is logged as ``name``.

    :raises JobError: when it is none.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.detach().reshape(())
    if isinstance(value, int | float):
        return torch.tensor(float(value), dtype=torch.float64)
    raise JobError(f"self.log({name!r}) was given a {type(value).__name__}; give it a number")


class _OnWholeBatches:
    """The ``update`` of a metric object, which is given rows of this device and shown those of all."""

    _inside = False

    def __init__(self, name: str, update: Callable[..., Any]) -> None:
        self._name, self._update = name, update

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        # One that is made of others shows them what it was shown.
        if _OnWholeBatches._inside or not is_shared():
            return self._update(*arguments, **named)
        whole = [self._whole(value) for value in arguments]
        named = {key: self._whole(value) for key, value in named.items()}
        _OnWholeBatches._inside = True
        try:
            return self._update(*whole, **named)
        finally:
            _OnWholeBatches._inside = False

    def _whole(self, value: Any) -> Any:
        if isinstance(value, _SAME_EVERYWHERE):
            return value
        if not isinstance(value, torch.Tensor) or not value.ndim:
            kind = "number" if isinstance(value, torch.Tensor | int | float) else type(value).__name__
            raise DoesNotFit(
                f"the metric {self._name!r} is updated with a {kind}, of which devices have others; give it "
                "tensors with one row for each sample"
            )
        return whole_batch(value)


def _nobody() -> bool:
    return False
