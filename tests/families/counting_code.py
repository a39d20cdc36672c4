"""Losses and models whose code counts somewhere else than in a variable of its own module.

Three epochs of two batches, of 5 samples and 1; what is resumed goes on at the second epoch. What they count
makes a difference from the fifth call on: later than the steps that a guard takes.
"""

# Functions with attributes, and models without types.
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from families import beside_code, data
from families.family import Family, register
from families.plain import stack
from families.remembering_data import Vectors

KIND = "state beside the data"


def _loss(outputs: torch.Tensor, targets: torch.Tensor, calls: int) -> torch.Tensor:
    return functional.cross_entropy(outputs, targets) / beside_code.divisor(calls)


def by_attribute(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Counts in an attribute of the function."""
    by_attribute.calls += 1
    return _loss(outputs, targets, by_attribute.calls)


by_attribute.calls = 0


def by_default(
    outputs: torch.Tensor,
    targets: torch.Tensor,
    seen: dict[str, int] = {"calls": 0},  # noqa: B006
) -> torch.Tensor:
    """Counts in a default of an argument."""
    seen["calls"] += 1
    return _loss(outputs, targets, seen["calls"])


def _closed() -> Callable[..., torch.Tensor]:
    calls = 0

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return _loss(outputs, targets, calls)

    return loss


#: Counts in what it closes over.
by_closure = _closed()


def by_another_module(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Asks a function of another module, which counts there."""
    return _loss(outputs, targets, beside_code.count())


def _weighed(outputs: torch.Tensor, targets: torch.Tensor, state: list[int]) -> torch.Tensor:
    state[0] += 1
    return _loss(outputs, targets, state[0])


#: With an argument that is given already.
by_partial = functools.partial(_weighed, state=[0])


class Counts:
    """An object that is called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return _loss(outputs, targets, self.calls)

    def method(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self(outputs, targets)


by_object = Counts()
by_method = Counts().method


class Asks(nn.Module):
    """Asks a function of another module, which counts there, in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.body = stack()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) / beside_code.divisor(beside_code.count() if self.training else 0)


class AsksAFunction(Asks):
    """Has a function as its attribute, which counts in what it closes over."""

    def __init__(self) -> None:
        super().__init__()
        self.count = beside_code.counter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) / beside_code.divisor(self.count() if self.training else 0)


def _fresh() -> None:
    """What a new process would have."""
    global by_closure, by_method
    by_attribute.calls = beside_code.CALLS = by_object.calls = 0
    by_default.__defaults__[0]["calls"] = 0  # type: ignore[index]
    by_partial.keywords["state"][0] = 0
    by_closure, by_method = _closed(), Counts().method


def _vectors() -> Any:
    _fresh()
    return torch.utils.data.DataLoader(Vectors(), data.BATCH)


LOSSES = {
    "a loss that counts in its attribute": "by_attribute",
    "a loss that counts in a default": "by_default",
    "a loss that counts in its closure": "by_closure",
    "a loss that counts in another module": "by_another_module",
    "a loss that counts in a partial": "by_partial",
    "a loss that is an object": "by_object",
    "a loss that is a method": "by_method",
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "a model that counts in another module": Asks,
    "a model that counts in a function": AsksAFunction,
}
register(
    *(
        Family(name, KIND, stack, _vectors, f"families.counting_code:{loss}", recipe={"epochs": 3})
        for name, loss in LOSSES.items()
    ),
    *(
        Family(name, KIND, model, _vectors, "families.plain:class_loss", recipe={"epochs": 3})
        for name, model in MODELS.items()
    ),
)
