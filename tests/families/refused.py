"""Models that a technique refuses, each for one reason."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

from families.plain import WIDTH, Block, Stack

CUTS = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


class ChangesInput(Block):
    """Halves its input in place once it has used it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = super().forward(x * 1.0)
        with torch.no_grad():
            x.mul_(0.5)
        return result


class ChangesWeight(Block):
    """Shrinks a weight before it uses it, as some constraints on weights are written."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.up.weight.mul_(0.95)
        return super().forward(x)


class Draws(Block):
    """Takes its scale from an iterator, which nobody can set back."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = itertools.cycle([1.0, 0.5, 2.0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * next(self.scales))


class Routes(Stack):
    """Hands each sample to one of its blocks, beginning with that of the first sample."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = (7 * x[:, 0].abs()).long() % len(self.blocks)
        x = self.first(x)
        found = x
        for place in range(len(self.blocks)):
            number = (int(chosen[0]) + place) % len(self.blocks)
            found = torch.where((chosen == number)[:, None], self.blocks[number](x), found)
        return self.last(found)


class Averages(Stack):
    """Ends with the mean of what all blocks returned."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        states = []
        for block in self.blocks:
            x = block(x)
            states.append(x)
        return self.last(torch.stack(states).mean(0))


class Gated(nn.Module):
    """Between layers that are cut, a gate that is used from the second step on."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Parameter(torch.ones(3))
        self.down = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        heads = torch.tanh(self.up(x)).unflatten(-1, (-1, 3))
        if self.calls > 1:
            heads = heads * self.gate
        return x + self.down(heads.flatten(-2))


class SumsHeads(nn.Module):
    """Between layers that are cut, a shift that also goes around them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.shift = nn.Parameter(torch.zeros(3))
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = torch.tanh(self.up(x)).unflatten(-1, (-1, 3)) + self.shift
        return x + self.down(heads.flatten(-2)) + 3 * self.shift.repeat(WIDTH // 3)


def _stack(kind: Any, depth: int = 3, of: type[Stack] = Stack) -> Stack:
    model = of([kind() for _ in range(depth)])
    model.tp_plan = CUTS  # type: ignore[assignment]
    return model


def changes_input() -> nn.Module:
    return _stack(ChangesInput)


def changes_weight() -> nn.Module:
    return _stack(ChangesWeight)


def draws() -> nn.Module:
    return _stack(Draws)


def hooked() -> nn.Module:
    model = _stack(Block)
    for parameter in model.blocks.parameters():
        parameter.register_hook(lambda gradient: None if gradient is None else 0.1 * gradient)
    return model


def routes() -> nn.Module:
    return _stack(Block, of=Routes)


def averages() -> nn.Module:
    return _stack(Block, of=Averages)


def gated() -> nn.Module:
    return _stack(Gated)


def sums_heads() -> nn.Module:
    return _stack(SumsHeads)
