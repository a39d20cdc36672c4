"""The number format that optimizers compute in, which may be a lower one than their parameters have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from saturn_airflow.parallelism.uncompiled import UncompiledDispatchMode


class UpdateFormat(UncompiledDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the lowest format of what is computed inside.

    Muon rounds matrices to bfloat16, as do optimizers that keep their state in it. Single numbers, as
    counters of steps are, don't count.
    """

    def __init__(self) -> None:
        super().__init__()
        #: The lowest one so far.
        self.lowest = torch.float64

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do what was asked for, and look at what came of it."""
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor) and value.dtype.is_floating_point and value.numel() > 1:
                self.lowest = max(self.lowest, value.dtype, key=lambda dtype: torch.finfo(dtype).eps)
        return result


@contextmanager
def noting_update_formats(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[UpdateFormat]:
    """Note what ``optimizers`` compute in, in the steps that they take inside."""
    noted, inside = UpdateFormat(), ExitStack()
    steps: list[torch.optim.Optimizer] = []  # one may call another's

    def begin(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not steps:
            inside.enter_context(noted)
        steps.append(optimizer)

    def end(*_: Any) -> None:
        steps.pop()
        if not steps:
            inside.close()

    hooks = [one.register_step_pre_hook(begin) for one in optimizers]
    hooks += [one.register_step_post_hook(end) for one in optimizers]
    try:
        yield noted
    finally:
        inside.close()
        for hook in hooks:
            hook.remove()
