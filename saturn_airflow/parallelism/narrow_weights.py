"""Which of a block's weights can travel in the format that it is computed in, with nothing different for it.

Under autocast a float32 weight of a matrix product is cast and then used; that may as well be done before it
travels. Not so a weight that is used otherwise too, as those of norms are. What a block does is watched once,
and what it gives is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from saturn_airflow.parallelism.recomputation import Call, Compute
from saturn_airflow.parallelism.uncompiled import UncompiledDispatchMode
from saturn_airflow.training.nested import tensors_in
from saturn_airflow.training.optim.plain_values import equal_tensors

_CAST = torch.ops.aten._to_copy.default

#: Computes a block with weights of which the given ones are narrow; calls the last with the weights.
Variant = Callable[[Sequence[bool], Callable[[Sequence[torch.Tensor]], object]], Compute]


def narrow_weights(
    name: str,
    block: nn.Module,
    count: int,
    lower: torch.dtype,
    variant: Variant,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> list[bool]:
    """Which of the ``count`` weights of ``block`` are cast to ``lower`` and not used otherwise.

    :param args: what the block is called with, and
    :param kwargs: by name; nothing of the block, the random generators or these is changed.
    """
    modules = list(block.modules())
    with torch.no_grad():
        casts = _Casts(lower)
        wide = Call(name, block, modules, variant([False] * count, casts.watch), args, kwargs)
        with casts:
            expected = wide.again()
        found = casts.narrow(count)
        if not any(found):
            return found
        narrow = Call(name, block, modules, variant(found, lambda weights: None), args, kwargs)
        return found if _same(expected, narrow.again()) else [False] * count


class _Casts(UncompiledDispatchMode):  # type: ignore[no-untyped-call]
    """Sees what becomes of weights, under all that autocast and autograd do."""

    def __init__(self, lower: torch.dtype) -> None:
        super().__init__()
        self._lower = lower
        self._numbers: dict[int, int] = {}
        self._cast: set[int] = set()
        self._otherwise: set[int] = set()

    def watch(self, weights: Sequence[torch.Tensor]) -> None:
        """Begin with these."""
        self._kept = weights
        self._numbers = {
            weight.untyped_storage()._cdata: number
            for number, weight in enumerate(weights)
            if type(weight) is torch.Tensor and weight.dtype == torch.float32
        }

    def narrow(self, count: int) -> list[bool]:
        """Of each weight whether it was cast, and nothing else."""
        seen = set(self._numbers.values()) & self._cast - self._otherwise
        return [number in seen for number in range(count)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._numbers:
            is_cast = func is _CAST and kwargs.get("dtype") == self._lower
            for part in _pytree.tree_leaves((args, kwargs)):
                if type(part) is torch.Tensor and part.layout == torch.strided:
                    number = self._numbers.get(part.untyped_storage()._cdata)
                    if number is not None:
                        whole = part.numel() == self._kept[number].numel()
                        (self._cast if is_cast and whole else self._otherwise).add(number)
        return func(*args, **kwargs)


def _same(one: Any, other: Any) -> bool:
    mine, others = list(tensors_in(one)), list(tensors_in(other))
    return len(mine) == len(others) and all(map(equal_tensors, mine, others))


class WithoutHooks(nn.Module):
    """A block without the hooks around its forward pass, for ``functional_call`` inside of these hooks.

    :param own: its forward pass.
    """

    def __init__(self, block: nn.Module, own: Compute) -> None:
        super().__init__()
        self.block = block
        self._own = own

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._own(*args, **kwargs)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The format that is computed in, where that is not the weights'."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
