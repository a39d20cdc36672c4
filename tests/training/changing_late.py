"""A model that changes what it is made of after the steps that a trial compares."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader, TensorDataset

#: The step in which something changes.
LATE = 5
CHANGES = (
    *("module", "function", "forward", "hook", "pre-hook", "gradient hook", "hook after gradients"),
    *("backward hook", "global function", "made function", "made closure", "given argument", "default"),
    *("function in a closure", "function as an argument", "function in an object", "function in a list"),
)
#: No late change: what a step needs it makes.
MADE_IN_EACH_STEP = "made in each step"
last_layer: Any = torch.tanh


def tanh(value: torch.Tensor) -> torch.Tensor:
    """A function that is there from the first."""
    return torch.tanh(value)


def halved(value: torch.Tensor) -> torch.Tensor:
    """Another."""
    return value * 0.5


def times(by: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """A closure that multiplies."""
    return lambda value: value * by


def by_default(by: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that multiplies by the default of its argument."""

    def multiplied(value: torch.Tensor, by: float = by) -> torch.Tensor:
        return value * by

    return multiplied


def scaled(parameter: torch.Tensor) -> None:
    """Scale the gradient of ``parameter``."""
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def halved_before(module: nn.Module, before: Any, behind: Any) -> Any:
    """Halve what a module passes back."""
    return (before[0] * 0.5,)


def composed(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A closure that calls."""
    return lambda value: function(value)


def called(function: Callable[[torch.Tensor], torch.Tensor], value: torch.Tensor) -> torch.Tensor:
    """What ``function`` makes of ``value``."""
    return function(value)


class Holder:
    """Calls what it holds."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.function = function

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return self.function(value)


class Late(nn.Module):
    """Changes ``what`` in its training's step :data:`LATE`, and makes a function and a hook in the first."""

    calls: torch.Tensor
    act: Any

    def __init__(self, what: str) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)
        self.function: Any = tanh
        self.what = what
        self.given: Any = functools.partial(torch.mul, 1.5)
        self.default = by_default(1.5)
        self.composed: Any = composed(tanh)
        self.called: Any = functools.partial(called, torch.tanh)
        self.holder: Any = Holder(tanh)
        self.listed: Any = [tanh]
        self.cache: dict[int, Any] = {}
        self.lazy: Any = None
        self.closure: Any = None
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        if self.lazy is None:
            self.lazy, self.closure = lambda value: value * 1.5, times(1.5)
            self.last.register_forward_hook(lambda module, given, found: found * 2)
        if self.training and torch.is_grad_enabled():
            self.calls += 1
            if self.what == MADE_IN_EACH_STEP:
                self.default = by_default(1 + 0.1 * int(self.calls))
            if int(self.calls) == LATE:
                self._change()
        value = self.lazy(self.function(self.act(self.first(x))))
        value = self.closure(self.default(self.given(value)))
        self.cache[len(self.cache)] = torch.tanh  # which takes no other's place
        value = self.cache[0](self.listed[0](self.holder(self.called(self.composed(value)))))
        return self.last(value)  # type: ignore[no-any-return]

    def _change(self) -> None:
        global last_layer
        weight: Any = self.first.weight
        if self.what == "module":
            self.act = nn.GELU()
        elif self.what == "function":
            self.function = halved
        elif self.what == "forward":
            self.act.forward = halved
        elif self.what == "hook":
            self.first.register_forward_hook(lambda module, given, found: found * 1.5)
        elif self.what == "pre-hook":
            self.first.register_forward_pre_hook(lambda module, given: (given[0] * 1.5,))
        elif self.what == "gradient hook":
            weight.register_hook(halved)
        elif self.what == "hook after gradients":
            weight.register_post_accumulate_grad_hook(scaled)
        elif self.what == "backward hook":
            self.last.register_full_backward_hook(halved_before)
        elif self.what == "global function":
            last_layer = halved
        elif self.what == "made function":  # its code differs in a number alone
            self.lazy = lambda value: value * 0.5
        elif self.what == "made closure":
            self.closure = times(0.5)
        elif self.what == "given argument":
            self.given = functools.partial(torch.mul, 0.5)
        elif self.what == "default":
            self.default = by_default(0.5)
        elif self.what == "function in a closure":
            self.composed = composed(halved)
        elif self.what == "function as an argument":
            self.called = functools.partial(called, torch.relu)
        elif self.what == "function in an object":
            self.holder.function = halved
        elif self.what == "function in a list":
            self.listed[0] = halved
        elif self.what == "parameters":
            self.last = nn.Linear(8, 1).double()
        elif self.what == "pruned":
            prune.l1_unstructured(self.first, "weight", 0.5)  # type: ignore[no-untyped-call]


def passed_on(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
    """A hook that changes nothing."""


def model(what: str) -> Late:
    """One that changes ``what``; global functions are as they were."""
    global last_layer
    last_layer = torch.tanh
    torch.manual_seed(1)
    made = Late(what)
    # Attributes of these names hold anything, as the handles that gradient_checkpointing_enable() leaves.
    handle = made.register_forward_hook(passed_on)
    vars(made).update(_require_grads_hooks=[handle], number_of_hooks=1)
    return made


def data() -> DataLoader[Any]:
    """Six batches."""
    generator = torch.Generator().manual_seed(2)
    samples = TensorDataset(torch.randn(24, 4, generator=generator), torch.randn(24, 1, generator=generator))
    return DataLoader(samples, batch_size=4)


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The squared distance, after a global function."""
    return nn.functional.mse_loss(last_layer(outputs), targets)


def plain_losses(what: str, epochs: int) -> list[float]:
    """Those of a loop that knows nothing of Saturn."""
    trained = model(what).double()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    losses = []
    for _ in range(epochs):
        for inputs, targets in data():
            found = loss(trained(inputs.double()), targets.double())
            optimizer.zero_grad()
            found.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(found.item())
    return losses
