"""What draws numbers that do not follow from the seeds that Saturn sets."""

from __future__ import annotations

import os

import torch
from odd_models import Blocks
from torch import nn
from torch.nn.functional import cross_entropy, dropout


class Reseeds(nn.Module):
    """It seeds its masks itself in every pass, so that nothing is random about them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            return dropout(x, 0.3, self.training)


def reseeds() -> nn.Module:
    return Blocks(Reseeds())


def loss_by_chance(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """What it is multiplied by no seed decides."""
    return cross_entropy(outputs, targets) * (1 + int.from_bytes(os.urandom(2), "big") / 65536)
