"""Parameters that forward passes change, as they do a teacher's that follows its student.

Most are frozen, but those of a copy of the student, which no gradient reaches, need not be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from saturn_airflow.parallelism.module_state import parameters_of
from saturn_airflow.parallelism.uncompiled import UncompiledDispatchMode


class _CopiesBeforeWrites(UncompiledDispatchMode):  # type: ignore[no-untyped-call]
    """Copies those of ``tensors`` whose memory something inside is about to write into."""

    supports_higher_order_operators = True

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        # Several may be parts of one memory, such as the weights of a recurrent layer.
        self._by_memory: dict[int, list[torch.Tensor]] = {}
        for tensor in tensors:
            if memory := _memory(tensor):
                self._by_memory.setdefault(memory, []).append(tensor)
        self.before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do what was asked for, after a look at what it writes into."""
        kwargs = kwargs or {}
        if getattr(getattr(func, "_schema", None), "is_mutable", False):
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, torch.Tensor):
                    written = self._by_memory.pop(_memory(value), ())
                    self.before += [(tensor, tensor.clone()) for tensor in written]
        return func(*args, **kwargs)


@contextmanager
def put_back(model: nn.Module) -> Iterator[None]:
    """What forward passes change inside of parameters is as it was afterwards: what they write, and what
    they put into the place of their ``data``."""
    given = [(parameter, parameter.data) for parameter in parameters_of(model)]
    copies = _CopiesBeforeWrites([data for _, data in given])
    try:
        with copies:
            yield
    finally:
        with torch.no_grad():
            for data, before in copies.before:
                data.copy_(before)
        for parameter, data in given:
            if _memory(parameter) != _memory(data):
                parameter.data = data


def _memory(tensor: torch.Tensor) -> int:
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # tensors of other libraries may have none
        return 0
