"""Jobs whose trial says too little: one gets slower when the trial is long over."""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

#: A trial sees no more than the first batches.
SEEN = 640


def linear(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2)).double()


class _Paced(TensorDataset):
    """So many seconds a sample; another pace after the first samples."""

    def __init__(self, inputs, targets, first, later):
        super().__init__(inputs, targets)
        self.first, self.later = first, later

    def __getitem__(self, index):
        time.sleep(self.first if index < SEEN else self.later)
        return super().__getitem__(index)


def paced(batch_size: int, samples: int = 2400, first: float = 0.004, later: float = 0.004) -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, 4, generator=generator, dtype=torch.float64)
    targets = (inputs[:, 0] + 0.5 * inputs[:, 1] > 0).long()
    return DataLoader(_Paced(inputs, targets, first, later), batch_size=batch_size)


def held_out(batch_size: int, **_) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(64, 4, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(inputs, (inputs[:, 0] + 0.5 * inputs[:, 1] > 0).long()), batch_size=64)


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets)
