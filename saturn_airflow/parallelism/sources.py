"""Following values through a forward pass: which parameters and blocks they were computed from."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from saturn_airflow.parallelism.uncompiled import UncompiledDispatchMode
from saturn_airflow.training.nested import tensors_in

_DRAWS = (torch.ops.aten.rand.default, torch.ops.aten.rand.generator)

Sources = int  # a set: bit i stands for parameter i, the bits after those of the parameters for blocks


class Follow(UncompiledDispatchMode):  # type: ignore[no-untyped-call]
    """While it is on, notes of every tensor what it was computed from, and counts the work.

    What is computed inside a block counts as computed from that block, too. Memory is what is followed, so
    views and what is written in place are too.

    Single random numbers that are drawn outside of the blocks are 0.

    :ivar inside: the bit of the block that is being computed, if any.
    :ivar read: sources of what was used since this was last set to 0.
    :ivar looked_at: sources of what became a Python number outside of the blocks, and so can decide what
        the model does, since this was last set to 0.
    :ivar work: multiplications and additions since this was last set to 0; for operations that nobody has
        counted, the numbers they read and write.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._sources: Any = WeakIdKeyDictionary()
        self.inside: Sources = 0
        self.read: Sources = 0
        self.looked_at: Sources = 0
        self.work = 0

    def of(self, data: Any) -> Sources:
        """The sources of the tensors in ``data``."""
        sources = 0
        for tensor in tensors_in(data):
            sources |= self._sources.get(tensor.untyped_storage(), 0)
        return sources

    def mark(self, tensor: torch.Tensor, sources: Sources) -> None:
        """Say what ``tensor`` was computed from."""
        self._sources[tensor.untyped_storage()] = sources

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What an operation returns, in memory of its own, or writes to was computed from all that it was
        # given.
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in _DRAWS and not result.ndim and not self.inside:
            # Such numbers decide which blocks are skipped: with 0 one is, where there is a chance of it.
            result.zero_()
        sources = self.of((args, kwargs))
        self.read |= sources
        if func is torch.ops.aten._local_scalar_dense.default and not self.inside:
            self.looked_at |= sources
        written = _written(func, args, kwargs)
        given = {id(tensor.untyped_storage()) for tensor in tensors_in((args, kwargs))}
        made = [tensor for tensor in tensors_in(result) if id(tensor.untyped_storage()) not in given]
        for tensor in [*made, *written]:
            self.mark(tensor, sources | self.inside)
        self.work += _work(func, args, kwargs, result)
        return result


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    written = []
    for number, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(args[number] if number < len(args) else kwargs.get(argument.name))
    return list(tensors_in(written))


def _work(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    count = flop_registry.get(getattr(func, "_overloadpacket", func))
    if count is not None:
        with suppress(Exception):  # some expect shapes that their operation does not
            return int(count(*args, **kwargs, out_val=result))
    if getattr(func, "is_view", False):
        return 0
    return sum(tensor.numel() for tensor in tensors_in((args, kwargs, result)))
