"""Models and data that go wrong in the ways a user's do."""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

# Whose arguments no source tells while a DAG is parsed.
AdamW = torch.optim.AdamW


def linear(inputs: int = 4) -> nn.Module:
    return nn.Linear(inputs, 2)


def missing_weights() -> nn.Module:
    raise FileNotFoundError("weights/latest.pt is not there")


def points(batch_size: int, samples: int = 256) -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, 4, generator=generator)
    return DataLoader(TensorDataset(inputs, (inputs[:, 0] > 0).long()), batch_size=batch_size, shuffle=True)


class _Slow(TensorDataset):
    """A tenth of a second per batch of 16, so that a trial sees only the first few batches."""

    def __getitem__(self, index):
        time.sleep(0.006)
        return super().__getitem__(index)


def slow_points(batch_size: int) -> DataLoader:
    inputs = torch.randn(512, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(_Slow(inputs, (inputs[:, 0] > 0).long()), batch_size=batch_size, shuffle=True)


class _Poisoned(_Slow):
    def __getitem__(self, index):
        if index == 600:
            raise KeyError("sample 600 is damaged")
        return super().__getitem__(index)


def poisoned_points(batch_size: int) -> DataLoader:
    """In order: the damaged sample comes long after the batches that a trial measures."""
    inputs = torch.randn(1024, 4)
    return DataLoader(_Poisoned(inputs, (inputs[:, 0] > 0).long()), batch_size=batch_size)


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets)


_batches_seen = 0


def diverging_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Not a number after 40 batches, which no trial of slow data reaches."""
    global _batches_seen
    _batches_seen += 1
    value = nn.functional.cross_entropy(outputs, targets)
    return value * float("nan") if _batches_seen > 40 else value
