"""Parameters that forward passes change, as they do a teacher's that follows its student.

Most are frozen, but those of a copy of the student, which no gradient reaches, need not be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from saturn_airflow.parallelism.module_state import parameters_of


class _CopiesBeforeWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Copies those of ``parameters`` that something inside is about to write into."""

    supports_higher_order_operators = True

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._by_memory = {_memory(p): p for p in parameters if _memory(p)}
        self.before: dict[nn.Parameter, torch.Tensor] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Do what was asked for, after a look at what it writes into."""
        kwargs = kwargs or {}
        if getattr(getattr(func, "_schema", None), "is_mutable", False):
            for value in tree_leaves((args, kwargs)):
                found = self._by_memory.get(_memory(value)) if isinstance(value, torch.Tensor) else None
                if found is not None and found not in self.before:
                    self.before[found] = found.detach().clone()
        return func(*args, **kwargs)


@contextmanager
def put_back(model: nn.Module) -> Iterator[None]:
    """What forward passes change inside of parameters is as it was afterwards."""
    copies = _CopiesBeforeWrites(list(parameters_of(model)))
    try:
        with copies:
            yield
    finally:
        with torch.no_grad():
            for parameter, before in copies.before.items():
                parameter.copy_(before)


def _memory(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # tensors of other libraries may have none
        return 0
