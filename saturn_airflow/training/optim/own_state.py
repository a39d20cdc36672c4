"""What an optimizer keeps as attributes of its own, such as a counter, besides its state and its groups."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from saturn_airflow.launch.request import DoesNotFit
from saturn_airflow.model.errors import JobError
from saturn_airflow.training.optim import plain_values, random_generators

_LARGEST = 4096  # numbers in a tensor: what is larger belongs beside the parameters
# What every optimizer has, and what torch and its schedulers note in it.
_KNOWN = {
    *("state", "param_groups", "defaults", "step", "_opt_called", "_zero_grad_profile_name"),
    *("_need_device_dtype_check_for_fused", "_warned_capturable_if_run_uncaptured"),
}
_MISSING = object()


class OwnState:
    """The attributes of ``optimizer``, which has just been made, that its steps change.

    :param lacks_some: whether it has but some of the model's parameters, or parts of them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, lacks_some: bool = False) -> None:
        self._optimizer = optimizer
        self._lacks_some = lacks_some
        self._given = self._now()
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        given = vars(optimizer).items()
        self._by_parameter = {
            name for name, value in given if isinstance(value, Mapping | list | tuple) and len(value) == count
        }

    def values(self) -> dict[str, Any]:
        """What has changed, JSON-ready.

        :raises JobError: when something has that a checkpoint can't hold.
        :raises DoesNotFit: when something of each parameter has, and not all of them are here.
        """
        changed = [
            name
            for name, now in self._now().items()
            if not plain_values.equal(now, self._given.get(name, _MISSING))
        ]
        return {name: self._encoded(name) for name in changed}

    def set(self, values: Mapping[str, Any]) -> None:
        """Continue with what :meth:`values` told."""
        for name, value in values.items():
            self._refuse_parts(name, plain_values.decode(value))
            there = vars(self._optimizer).get(name)
            setattr(self._optimizer, name, plain_values.restored(there, value))

    def _now(self) -> dict[str, Any]:
        own = vars(self._optimizer).items()
        return {name: seen(value, {}) for name, value in own if not _is_known(name)}

    def _encoded(self, name: str) -> Any:
        value = getattr(self._optimizer, name)
        what = f"what {type(self._optimizer).__name__} keeps as its attribute {name!r}"
        self._refuse_parts(name, value)
        if _holds_optimizers(value):
            raise JobError(
                f"{type(self._optimizer).__name__} keeps optimizers of its own as its attribute {name!r}, "
                "whose state would be lost when the job is resumed. Let one class step on groups of "
                "parameters (HParams(parameter_groups=...)), or let the model's configure_optimizers return "
                "them, with a training_step of its own (Job(own_step=True))"
            )
        if not _is_small(value):
            raise JobError(
                f"{what} changes while it trains, and can't be resumed; keep what belongs to a parameter in "
                "self.state[parameter], and numbers in self.param_groups"
            )
        return plain_values.encode(value, what)

    def _refuse_parts(self, name: str, value: Any) -> None:
        if self._lacks_some and (name in self._by_parameter or _holds_arrays(value)):
            raise DoesNotFit(
                f"{type(self._optimizer).__name__} keeps something of each parameter as its attribute "
                f"{name!r}, and no device has all parameters here, so it can't be put together; keep it in "
                "self.state[parameter], or use single, ddp or spill"
            )


def _is_known(name: str) -> bool:
    return name in _KNOWN or name.startswith("_optimizer_")


def seen(value: Any, memo: dict[int, Any]) -> Any:
    """What of ``value`` a step may change, so that it can be compared with another time."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    # A logger notes which levels are heard.
    known = isinstance(value, nn.Parameter | nn.Module | type | logging.Logger)
    if known or id(value) in memo or callable(value):
        return id(value)
    memo[id(value)] = value
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if value.numel() <= _LARGEST else (id(value), value._version)
    if random_generators.is_generator(value):
        return plain_values.encode(value, "it")
    if isinstance(value, Mapping):
        return {id(k) if isinstance(k, torch.Tensor) else k: seen(v, memo) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [seen(item, memo) for item in value]
    if hasattr(value, "__dict__"):
        return {name: seen(item, memo) for name, item in vars(value).items()}
    return repr(value)


def _holds_arrays(value: Any) -> bool:
    """Whether there is a tensor with dimensions in it."""
    if isinstance(value, Mapping | list | tuple):
        return any(map(_holds_arrays, value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, torch.Tensor) and value.ndim > 0


def _holds_optimizers(value: Any) -> bool:
    if isinstance(value, Mapping | list | tuple):
        return any(map(_holds_optimizers, value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, torch.optim.Optimizer)


def _is_small(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_small(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_small, value))
    if isinstance(value, torch.Tensor):
        return type(value) is torch.Tensor and value.numel() <= _LARGEST
    if random_generators.is_generator(value):
        return True
    return value is None or isinstance(value, bool | int | float | str)
