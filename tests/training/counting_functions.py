"""Losses and models that count in functions: attributes, closures, defaults, arguments, other modules."""

# Functions with attributes, and models without types.
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import counting_elsewhere
import remembering_jobs
import torch
from torch import nn
from torch.nn.functional import mse_loss


def _loss(outputs: torch.Tensor, targets: torch.Tensor, calls: int) -> torch.Tensor:
    """Other than a mean of squares later than a guard's steps."""
    return mse_loss(outputs, targets) * (1 + max(0, calls - 4))


def by_attribute(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    by_attribute.calls += 1
    return _loss(outputs, targets, by_attribute.calls)


by_attribute.calls = 0


def by_default(
    outputs: torch.Tensor,
    targets: torch.Tensor,
    seen: dict[str, int] = {"calls": 0},  # noqa: B006
) -> torch.Tensor:
    seen["calls"] += 1
    return _loss(outputs, targets, seen["calls"])


def counted(loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A decorator that hands on how often it was called."""
    calls = 0

    @functools.wraps(loss)
    def with_count(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return loss(outputs, targets, calls)

    return with_count


by_closure = counted(_loss)


def _with_state(outputs: torch.Tensor, targets: torch.Tensor, state: list[int]) -> torch.Tensor:
    state[0] += 1
    return _loss(outputs, targets, state[0])


by_argument = functools.partial(_with_state, state=[0])


class Counts:
    def __init__(self) -> None:
        self.calls = 0

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return _loss(outputs, targets, self.calls)


by_method = Counts().loss


def by_another_module(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return _loss(outputs, targets, counting_elsewhere.count())


def by_new_attribute(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    by_new_attribute.calls = getattr(by_new_attribute, "calls", 0) + 1
    return _loss(outputs, targets, by_new_attribute.calls)


LOSSES = (
    "by_attribute",
    "by_new_attribute",
    "by_default",
    "by_closure",
    "by_argument",
    "by_method",
    "by_another_module",
)


def _numbers() -> Iterator[int]:
    calls = 0
    while True:
        calls += 1
        yield calls


def _generated() -> Callable[..., torch.Tensor]:
    numbers = _numbers()
    return lambda outputs, targets: _loss(outputs, targets, next(numbers))


by_generator = _generated()


def counts_in_a_function(kind: str) -> nn.Module:
    """A line that a function is part of, as an attribute or as a hook."""
    model = nn.Sequential(remembering_jobs.line())
    calls = 0

    def later(module: nn.Module, inputs: tuple[torch.Tensor], outputs: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += module.training
        return outputs * (1 + max(0, calls - 4))

    def notes(module: nn.Module, inputs: tuple[torch.Tensor], outputs: torch.Tensor) -> torch.Tensor:
        now: int = getattr(notes, "calls", 0) + module.training
        notes.calls = now
        return outputs * (1 + max(0, now - 4))

    if kind == "attribute":
        return CallsIt(model, later)
    if kind == "new attribute":
        return CallsIt(model, notes)
    if kind == "two hooks":
        model[0].register_forward_pre_hook(_seldom())
    model[0].register_forward_hook(Later() if kind == "object" else later)
    return model


def _seldom() -> Callable[..., tuple[torch.Tensor]]:
    calls = 0

    def seldom(module: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        nonlocal calls
        calls += 2 * module.training
        return (inputs[0] * (1 + max(0, calls - 6)),)

    return seldom


class Later:
    """A hook that is an object."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, module: nn.Module, inputs: tuple[torch.Tensor], outputs: torch.Tensor) -> torch.Tensor:
        self.calls += module.training
        return outputs * (1 + max(0, self.calls - 4))


class Node:
    """Of a tree in which each knows its parent."""

    def __init__(self, parent: Node | None = None) -> None:
        self.parent, self.children = parent, [] if parent else [Node(self), Node(self)]


TREE = Node()
RING: dict[str, object] = {}
RING["ring"] = RING


def holds_what_holds_itself() -> nn.Module:
    """A line with a tree, and a dictionary of itself, which nothing changes."""
    model = remembering_jobs.line()
    vars(model).update(tree=Node(), ring={"ring": RING})
    return model


class CallsIt(nn.Module):
    def __init__(self, line: nn.Module, later: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.line, self.later = line, later

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.later(self, (inputs,), self.line(inputs))


class Notes(nn.Module):
    """A block, of which the fourth makes a difference after some passes."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.calls = 0
        self.is_last = number == 3

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        outputs = inputs + torch.tanh(self.line(inputs))
        return outputs * (1 + max(0, self.calls - 5) / 8) if self.is_last else outputs


class Says(Notes):
    """One that says itself what it keeps."""

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def counting_blocks(says: bool) -> nn.Module:
    torch.manual_seed(1)
    blocks = [(Says if says else Notes)(number) for number in range(4)]
    return nn.Sequential(*blocks, nn.Linear(4, 1))
