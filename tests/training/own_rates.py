"""Functions of schedules that remember things, and an optimizer that draws."""

from __future__ import annotations

import random
from typing import Any

import torch


def counting() -> Any:
    seen: list[int] = []

    def rate(step: int) -> float:
        seen.append(step)
        return 1 / len(seen)

    return rate


class Draws:
    """A rate that draws, and notes it in a list."""

    def __init__(self) -> None:
        self.rng, self.drawn = random.Random(3), [1.0]

    def __call__(self, step: int) -> float:
        self.drawn.append(self.rng.random())
        return self.drawn[-1] / len(self.drawn)


class Noisy(torch.optim.SGD):
    """Draws random numbers, as Langevin dynamics does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=0.01)
