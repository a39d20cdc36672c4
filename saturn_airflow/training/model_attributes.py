"""What a model's modules remember as plain attributes, such as a counter of their own, besides buffers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from saturn_airflow.parallelism.module_state import copied
from saturn_airflow.training.optim import plain_values

#: By a module's name, values by the attribute's.
Attributes = dict[str, dict[str, Any]]

_OWN = frozenset(vars(nn.Module()))
_MOST = 64  # items of a container
_LARGEST = 4096  # numbers of a tensor that a checkpoint keeps: what is larger is a result, no memory


def plain_attributes(model: nn.Module) -> Attributes:
    """The numbers, strings, tensors and small containers that modules hold as attributes."""
    found: Attributes = {}
    for prefix, module in model.named_modules():
        own = {key: value for key, value in vars(module).items() if key not in _OWN and _is_plain(value)}
        found[prefix] = copied(own, {})
    return found


def changed(before: Attributes, now: Attributes) -> Attributes:
    """What of ``now`` is not as it was."""
    return {
        prefix: {
            key: value
            for key, value in attributes.items()
            if key not in before.get(prefix, {}) or not plain_values.equal(before[prefix][key], value)
        }
        for prefix, attributes in now.items()
    }


class ModelAttributes:
    """The attributes that training changes, for checkpoints.

    :param model: as this rank trains it, before its first step.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        self._device = device
        self.given = plain_attributes(model)

    def values(self) -> Attributes:
        """What has changed, JSON-ready."""
        now = changed(self.given, plain_attributes(self._model))
        return {
            prefix: {
                key: plain_values.encode(value, key) for key, value in own.items() if _can_be_kept(value)
            }
            for prefix, own in now.items()
            if own
        }

    def set(self, values: Mapping[str, Mapping[str, Any]]) -> None:
        """Continue with what :meth:`values` told, as far as the modules are on this rank."""
        modules = dict(self._model.named_modules())
        for prefix, own in values.items():
            if (module := modules.get(prefix)) is not None:
                there = {*module._parameters, *module._buffers, *module._modules}
                found = {key: plain_values.decode(value) for key, value in own.items() if key not in there}
                module.__dict__.update({key: self._placed(value) for key, value in found.items()})

    def _placed(self, value: Any) -> Any:
        return value.to(self._device) if isinstance(value, torch.Tensor) else value


def merged(parts: Iterable[Attributes]) -> Attributes:
    """The attributes of all modules, from the ranks' parts: the first that has one."""
    found: Attributes = {}
    for part in parts:
        for prefix, own in part.items():
            found[prefix] = {**own, **found.get(prefix, {})}
    return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not isinstance(value, nn.Parameter | DTensor)
    if isinstance(value, list | tuple):
        return _is_short(value) and all(map(_is_plain, value))
    if isinstance(value, dict):
        return _is_short(value) and all(map(_is_plain, value.values()))
    return value is None or isinstance(value, bool | int | float | str)


def _is_short(value: Sequence[Any] | Mapping[Any, Any]) -> bool:
    return len(value) <= _MOST


def _can_be_kept(value: Any) -> bool:
    """Whether a checkpoint can hold it: no tensor of a graph, and no result of the last batch."""
    if isinstance(value, torch.Tensor):
        dense = value.layout == torch.strided and not value.is_complex()
        return dense and not value.requires_grad and value.numel() <= _LARGEST
    if isinstance(value, list | tuple):
        return all(map(_can_be_kept, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _can_be_kept(item) for key, item in value.items())
    return True
