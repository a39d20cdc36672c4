"""The number formats a job computes in."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn


def exact(precision: str) -> str:
    """The format that a job of this precision is compared in: its own, or float32 where it rounds more."""
    return "float32" if precision in ("bf16", "tf32") else precision


def use(precision: str) -> None:
    """Let float32 be multiplied as this precision says, from here on: in TensorFloat-32, or exactly.

    Torch's own default is exact for matrices and TensorFloat-32 for convolutions and recurrent layers, and
    the job's code may have said otherwise, by any of the ways there are. They are two sets of settings, of
    which torch raises where it finds them at odds, so all are set. CPUs are always exact. See
    https://docs.pytorch.org/docs/stable/notes/cuda.html, "TensorFloat-32".
    """
    rounds = precision == "tf32"
    torch.set_float32_matmul_precision("high" if rounds else "highest")
    torch.backends.cudnn.allow_tf32 = rounds
    backends: Any = torch.backends
    for operations in (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn):
        operations.fp32_precision = "tf32" if rounds else "ieee"
    for operations in (backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn):
        operations.fp32_precision = "ieee"


@contextmanager
def exactly(precision: str) -> Iterator[None]:
    """Compute in :func:`exact` ``precision`` for as long as this lasts, and in ``precision`` afterwards."""
    use(exact(precision))
    try:
        yield
    finally:
        use(precision)


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
    """``data`` with ``function`` applied to each tensor in its mappings, sequences and dataclasses."""
    return map_parts(lambda path, part: function(part) if isinstance(part, torch.Tensor) else part, data)


def map_parts(
    function: Callable[[tuple[Any, ...], Any], Any],
    data: Any,
    path: tuple[Any, ...] = (),
    stop: Callable[[tuple[Any, ...]], bool] = lambda path: False,
) -> Any:
    """``data`` with ``function(path, part)`` in the place of all that is no container.

    :param path: where ``data`` lies: the keys, positions and field names that lead there.
    :param stop: says of the path of a container that it is a part like others.
    """

    def inner(key: Any, value: Any) -> Any:
        return map_parts(function, value, (*path, key), stop)

    if isinstance(data, torch.Tensor) or stop(path):
        return function(path, data)
    if isinstance(data, Mapping):
        return _like(data, {key: inner(key, value) for key, value in data.items()})
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*map(inner, data._fields, data))
    if isinstance(data, list | tuple):
        return type(data)(inner(index, value) for index, value in enumerate(data))
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        changed = copy.copy(data)
        for field in dataclasses.fields(data):
            object.__setattr__(changed, field.name, inner(field.name, getattr(data, field.name)))
        return changed
    return function(path, data)


def _like(mapping: Mapping[Any, Any], values: dict[Any, Any]) -> Mapping[Any, Any]:
    """``values`` as a mapping of the same kind, such as Hugging Face's BatchEncoding, where it is made so."""
    if type(mapping) is dict:
        return values
    try:
        return type(mapping)(values)  # type: ignore[call-arg]
    except TypeError:
        return values
