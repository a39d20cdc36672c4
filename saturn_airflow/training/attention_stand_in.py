"""Attention that takes no more memory than any kernel for it: for predictions on tensors without data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_ATTENTION = functional.scaled_dot_product_attention


@contextmanager
def lean_attention() -> Iterator[None]:
    """Inside, ``scaled_dot_product_attention`` computes nothing, and takes what FlashAttention would.

    On a CPU it may take the way that holds the matrix of all scores, as with dropout, where a GPU's kernels
    hold queries, keys, values and the output alone (Dao et al., 2022).
    """
    # Torch's own modules call it where no mode is on; others may have imported it by name.
    with mock.patch.object(functional, "scaled_dot_product_attention", _attend), _ReplacedByName():
        yield


class _ReplacedByName(TorchFunctionMode):
    """Replaces the function where it was imported by name."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (_attend if func is _ATTENTION else func)(*args, **(kwargs or {}))


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    kind = query.device.type
    if torch.is_autocast_enabled(kind) and query.is_floating_point():
        query, key, value = (t.to(torch.get_autocast_dtype(kind)) for t in (query, key, value))
    attended: torch.Tensor = _AttentionOfShapes.apply(query, key, value)  # type: ignore[no-untyped-call]
    return attended


class _AttentionOfShapes(torch.autograd.Function):
    """Attention without data: what comes out, and its gradients, have the right shapes."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out = query.new_empty((*query.shape[:-1], value.shape[-1]))
        ctx.save_for_backward(query, key, value, out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
