"""The number formats a job computes in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn


def cast_model(model: nn.Module, precision: str) -> nn.Module:
    """``model`` with its weights in the format that ``HParams.precision`` keeps them in."""
    return model.double() if precision == "float64" else model


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """The context that forward passes and losses are computed in."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext()


def place(data: Any, device: torch.device, precision: str) -> Any:
    """A batch on ``device``, its floating-point tensors in float64 where that is the job's precision."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        wider = precision == "float64" and tensor.is_floating_point()
        return tensor.to(device, torch.float64 if wider else tensor.dtype, non_blocking=True)

    return map_tensors(move, data)


def map_tensors(function: Callable[[torch.Tensor], Any], data: Any) -> Any:
    """``data`` with ``function`` applied to each tensor in its mappings, lists and tuples."""
    if isinstance(data, torch.Tensor):
        return function(data)
    if isinstance(data, Mapping):
        return {key: map_tensors(function, value) for key, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(map_tensors(function, value) for value in data))
    if isinstance(data, list | tuple):
        return type(data)(map_tensors(function, value) for value in data)
    return data
