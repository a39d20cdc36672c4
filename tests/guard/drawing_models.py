"""What draws numbers that do not follow from the seeds that Saturn sets."""

from __future__ import annotations

import os
from random import random as drawn
from typing import Any

import numpy as np
import torch
from odd_models import Blocks, vectors
from torch import nn, randn_like
from torch.nn.functional import cross_entropy, dropout, scaled_dot_product_attention
from torch.utils.data import DataLoader, Dataset


class Reseeds(nn.Module):
    """It seeds its masks itself in every pass, so that nothing is random about them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            return dropout(x, 0.3, self.training)


class SeedsByPass(nn.Module):
    """It seeds its masks by the number of the pass, which it keeps as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += self.training
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.passes)
            return dropout(x, 0.3, self.training)


class Adapter(nn.Module):
    """Dropout before an adapter that adds next to nothing; what it adds to is computed in float32.

    :param begun: whether it adds anything at all yet.
    """

    def __init__(self, begun: bool) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(8, 4), nn.Linear(4, 8)
        if not begun:
            nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float().to(x.dtype)
        added: torch.Tensor = self.up(self.down(dropout(x, 0.3, self.training)))
        return x + 1e-6 * added


class SkipsByName(nn.Module):
    """It leaves a layer out by chance, by a function of Python's that it has imported by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.training and drawn() < 0.5 else x + self.layer(x)


class TorchsByName(nn.Module):
    """Noise, and masks in attention, by functions of torch that were imported by name."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        noisy = (x + 0.1 * randn_like(x)).unsqueeze(-1)
        return scaled_dot_product_attention(noisy, noisy, noisy, dropout_p=0.3).squeeze(-1)


class DrawsInVain(nn.Module):
    """It draws masks that change nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0 * dropout(x, 0.3, self.training)


def adapted(begun: bool = True) -> nn.Module:
    return Blocks(Adapter(begun))


def torchs_by_name() -> nn.Module:
    return Blocks(TorchsByName())


def skips_by_name() -> nn.Module:
    return Blocks(SkipsByName())


def draws_in_vain() -> nn.Module:
    return Blocks(DrawsInVain())


def seeds_by_pass() -> nn.Module:
    return Blocks(SeedsByPass())


def reseeds() -> nn.Module:
    return Blocks(Reseeds())


def loss_by_chance(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """What it is multiplied by no seed decides."""
    return cross_entropy(outputs, targets) * (1 + int.from_bytes(os.urandom(2), "big") / 65536)


class NoisyByChance(Dataset[Any]):
    """Each sample is another one each time, by a generator without a seed."""

    def __init__(self) -> None:
        self.rows: Any = vectors().dataset

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        x, target = self.rows[index]
        return x + torch.from_numpy(np.random.default_rng().normal(size=len(x))).to(x), target


def noisy_by_chance(batch_size: int = 6) -> DataLoader[Any]:
    return DataLoader(NoisyByChance(), batch_size)
