"""Modules that remember values of many kinds, each of which changes the next step."""

from __future__ import annotations

import itertools
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn


@dataclass
class Notes:
    count: int = 0
    seen: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Frozen:
    count: int


class Pair(NamedTuple):
    count: int
    name: str


class Tracker:
    """An object of no particular kind."""

    def __init__(self) -> None:
        self.count = 0
        self.by_name = {"a": Notes()}

    def next(self) -> float:
        self.count += 1
        self.by_name["a"].count += 2
        return self.count + self.by_name["a"].count


def _of_array(m: Any, x: torch.Tensor) -> float:
    m.kept[1] += 1
    return float(m.kept.sum())


def _of_deque(m: Any, x: torch.Tensor) -> float:
    m.kept.append(len(m.kept) + 1)
    return sum(m.kept)


def _of_set(m: Any, x: torch.Tensor) -> float:
    m.kept.add(len(m.kept))
    return len(m.kept)


def _of_counter(m: Any, x: torch.Tensor) -> float:
    m.kept["steps"] += 1
    return m.kept["steps"]


def _of_ordered(m: Any, x: torch.Tensor) -> float:
    m.kept[len(m.kept)] = 1.5
    m.kept.move_to_end(0)
    return next(iter(m.kept)) + len(m.kept)


def _of_lists(m: Any, x: torch.Tensor) -> float:
    m.kept[(1, 2)].append(2)
    return len(m.kept[1, 2])


def _of_notes(m: Any, x: torch.Tensor) -> float:
    m.kept.count += 1
    m.kept.seen.append(m.kept.count)
    return sum(m.kept.seen)


def _of_many_notes(m: Any, x: torch.Tensor) -> float:
    m.kept.append(Notes(len(m.kept)))
    return sum(notes.count for notes in m.kept)


def _of_frozen(m: Any, x: torch.Tensor) -> float:
    m.kept = Frozen(m.kept.count + 1)
    return m.kept.count


def _of_pair(m: Any, x: torch.Tensor) -> float:
    m.kept = m.kept._replace(count=m.kept.count + 1)
    return m.kept.count


def _of_large(m: Any, x: torch.Tensor) -> float:
    m.kept = m.kept + 1e-3
    return float(m.kept[-1])


def _of_last_output(m: Any, x: torch.Tensor) -> float:
    before = 0.0 if m.kept is None else float(m.kept.detach().sum())
    m.kept = m.plain(x)
    return before


class Phase(Enum):
    FIRST = 1
    SECOND = 2


def _of_phase(m: Any, x: torch.Tensor) -> float:
    m.calls += 1
    if m.calls == 3:
        m.kept = Phase.SECOND
    return float(m.kept.value)


def _of_emptied(m: Any, x: torch.Tensor) -> float:
    m.calls += 1
    m.kept = m.kept[:0] if m.calls % 3 == 0 else torch.cat([m.kept, x.detach()])
    return float(len(m.kept) + m.kept.shape[1])


def _of_bytes(m: Any, x: torch.Tensor) -> float:
    m.kept.append(1)
    return len(m.kept)


#: What a module keeps, and how it goes on with it: (at the beginning, a number for the next pass).
KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any, torch.Tensor], float]]] = {
    "an array": (lambda: np.zeros(3), _of_array),
    "a deque": (lambda: deque([1], maxlen=4), _of_deque),
    "a set": (set, _of_set),
    "a Counter": (Counter, _of_counter),
    "an OrderedDict": (OrderedDict, _of_ordered),
    "a defaultdict": (lambda: defaultdict(list), _of_lists),
    "a dataclass": (Notes, _of_notes),
    "a list of dataclasses": (list, _of_many_notes),
    "a frozen dataclass": (lambda: Frozen(0), _of_frozen),
    "a named tuple": (lambda: Pair(0, "p"), _of_pair),
    "an object": (Tracker, lambda m, x: m.kept.next()),
    "a random.Random": (lambda: random.Random(3), lambda m, x: m.kept.random()),
    "a numpy Generator": (lambda: np.random.default_rng(3), lambda m, x: m.kept.random()),
    "a torch Generator": (
        lambda: torch.Generator().manual_seed(3),
        lambda m, x: float(torch.empty(1).uniform_(generator=m.kept)),
    ),
    "a count": (itertools.count, lambda m, x: next(m.kept)),
    "a bytearray": (bytearray, _of_bytes),
    "a large tensor": (lambda: torch.zeros(5000), _of_large),
    "an enumeration": (lambda: Phase.FIRST, _of_phase),
    "a queue that is emptied": (lambda: torch.zeros(1, 4).double(), _of_emptied),
    "the last output": (lambda: None, _of_last_output),
}


class Remembers(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.plain = nn.Linear(4, 1)
        self.kind = kind
        self.kept = KINDS[kind][0]()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.plain(x) * (1 + KINDS[self.kind][1](self, x) / 50)


def remembers(kind: str) -> nn.Module:
    torch.manual_seed(1)
    return Remembers(kind)
