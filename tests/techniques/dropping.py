"""Models that draw random numbers between layers that `tensor` cuts, and beside them."""

from __future__ import annotations

import random as pythons
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

WIDTH = 32
GENERATOR = torch.Generator().manual_seed(5)


class Between(nn.Module):
    """Units that are alike, of which some are dropped between cut layers in the way named ``how``."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.up = nn.Linear(4, WIDTH)
        self.down = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        changed: torch.Tensor = self.down(getattr(self, f"_{self.how}")(self.up(x), x))
        return changed

    def _units(self, units: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(units, 0.5, self.training)

    def _masked(self, units: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        mask = torch.bernoulli(torch.full_like(units, 0.5))
        return units * mask * 2 if self.training else units

    def _heads(self, units: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        heads = units.reshape(len(units), -1, 1, 4)
        p = 0.5 if self.training else 0.0
        return functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=p).flatten(1)

    def _whole(self, units: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return units * functional.dropout(x, 0.5, self.training).mean()

    def _samples(self, units: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return units * units.new_empty(len(units), 1).bernoulli_(0.5)

    def _channels(self, units: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout1d(units.unsqueeze(-1), 0.5, self.training).squeeze(-1)

    def _numpy(self, units: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return units * torch.from_numpy(np.random.binomial(1, 0.5, units.shape)) if self.training else units

    def _own(self, units: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return units * torch.rand(units.shape, generator=GENERATOR) if self.training else units

    def _all(self, units: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        kept = np.random.rand() < 0.5, pythons.random() < 0.5
        samples = torch.rand(len(units), 1, generator=GENERATOR)
        return units * all(kept) * samples if self.training else units

    def _nothing(self, units: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return units


class Residual(nn.Module):
    """Blocks that draw between cut layers, each with a dropout of the whole behind it."""

    def __init__(self, how: str, blocks: int, p: float, again: bool) -> None:
        super().__init__()
        self.again = again
        self.blocks = nn.ModuleList(Between(how) for _ in range(blocks))
        self.drop = nn.Dropout(p)
        self.tp_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            computed = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
            x = x + self.drop(computed)
        return x


def even(how: str = "units") -> nn.Module:
    """All units are alike, so that a mask's variance shows in the output's."""
    model = Residual(how, 1, 0.0, False)
    for parameter in model.parameters():
        nn.init.constant_(parameter, 1 / WIDTH if parameter.shape[-1] == WIDTH else 0.25)
    return model


def random(how: str = "units", again: bool = False) -> nn.Module:
    torch.manual_seed(3)
    return Residual(how, 3, 0.2, again)


def ones(samples: int = 400) -> DataLoader[Any]:
    row = torch.ones(4, dtype=torch.float64)
    return DataLoader([(row, row)] * samples, batch_size=1)  # type: ignore[arg-type]


def output(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.mean()
