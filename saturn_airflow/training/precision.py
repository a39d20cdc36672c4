"""The number formats a job computes in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from saturn_airflow.training import pinned_batches
from saturn_airflow.training.nested import map_tensors


def exact(precision: str, model: nn.Module | None = None) -> str:
    """The format that a job of this precision is compared in: its own, or float32 where it rounds more.

    In bf16, where ``model`` keeps weights in 16 bits: beside others in float32 it may compute under autocast
    alone, and nothing is lost by it, for it rounds as much without.
    """
    if precision == "bf16" and model is not None and _has_narrow_weights(model):
        return precision
    return "float32" if precision in ("bf16", "tf32") else precision


def _has_narrow_weights(model: nn.Module) -> bool:
    return any(p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters())


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

    placed = map_tensors(move, data)
    pinned_batches.note(data, device)
    return placed
