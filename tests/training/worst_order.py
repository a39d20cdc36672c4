"""Transfers as bad as the waits allow: what nobody waited for comes late, and is NaN until then.

``late(line)`` decides of each copy and each task whether it is done at once, or when it is waited for. Either
is what a device may do. Streams and lanes keep their order. What is computed is computed at once here, on a
device late: what a copy is made of must stay as it is until the host has waited.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from saturn_airflow.parallelism.transfers import Lane


def poison(tensor: torch.Tensor) -> None:
    """NaN in every floating-point format."""
    with torch.no_grad():
        tensor.fill_(float("nan") if tensor.is_floating_point() else 255)


class Asked:
    """Something that was asked for, after what the same stream was asked for before."""

    def __init__(self, line: list[Asked], work: Callable[[], Any]) -> None:
        self._line, self._work = line, work
        self._done, self._value = False, None
        line.append(self)

    def result(self) -> Any:
        while not self._done:
            self._line.pop(0)._do()
        return self._value

    def _do(self) -> None:
        with _disable_current_modes():  # which a thread of its own has not got
            self._value, self._done = self._work(), True


class WorstOrder:
    """Transfers on a CPU; ``broken`` names a wait that is none, as if it had been forgotten."""

    staged = True

    def __init__(self, late: Callable[[str], bool], broken: str = "") -> None:
        self._late = late
        self._broken = broken
        self._buffers: set[int] = set()
        self._read: dict[Asked, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._lines: dict[str, list[Asked]] = {name: [] for name in ("in", "out", "to device", "to host")}

    def buffer(self, size: int) -> torch.Tensor:
        buffer = torch.full((size,), 255, dtype=torch.uint8)
        self._buffers.add(buffer.data_ptr())
        return buffer

    def to_device(self, sources: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        self._check_pinned(sources)
        copies = [torch.empty_like(source) for source in sources]
        ticket = self._copy("to device", sources, copies)
        self._read[ticket] = [(source, source.clone()) for source in sources]
        return copies, ticket

    def to_host(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> Any:
        self._check_pinned(targets)
        return self._copy("to host", sources, targets)

    def _check_pinned(self, tensors: Sequence[torch.Tensor]) -> None:
        """Others than those in buffers would hold up what is computed."""
        usual = [t for t in tensors if t.layout == torch.strided and t.numel()]
        assert all(t.untyped_storage().data_ptr() in self._buffers for t in usual), "a copy is not pinned"

    def compute_after(self, ticket: Any, copies: Sequence[torch.Tensor]) -> None:
        if self._broken != "compute_after":
            ticket.result()

    def wait(self, ticket: Any) -> None:
        if self._broken != "wait" and ticket is not None:
            ticket.result()
            self._check(ticket)
            self._read.pop(ticket, None)

    def check(self) -> None:
        """Whether all is as it was that the host has not waited for.

        :raises AssertionError: when it is not.
        """
        for ticket in self._read:
            self._check(ticket)

    def _check(self, ticket: Asked) -> None:
        for source, as_it_was in self._read.get(ticket, []):
            same = (source == as_it_was) | ((source != source) & (as_it_was != as_it_was))
            assert bool(same.all()), "changed while a copy of it may be under way"

    def computed(self) -> Any:
        return None

    def begin(self, lane: Lane, work: Callable[[], Any]) -> Any:
        return self._asked(lane, work)

    def _copy(self, line: str, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> Asked:
        for target in targets:
            poison(target)

        def copy() -> None:
            with torch.no_grad():
                for source, target in zip(sources, targets, strict=True):
                    target.copy_(source)

        return self._asked(line, copy)

    def _asked(self, line: str, work: Callable[[], Any]) -> Asked:
        asked = Asked(self._lines[line], work)
        if not self._late(line):
            asked.result()
        return asked
