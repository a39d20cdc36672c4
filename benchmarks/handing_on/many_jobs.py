"""A job that takes a moment."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def points(batch_size: int) -> DataLoader[Any]:
    """Random points."""
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(inputs, (inputs[:, 0] > 0).long()), batch_size=batch_size)


def linear() -> nn.Module:
    """A single layer."""
    return nn.Linear(4, 2)


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy."""
    return nn.functional.cross_entropy(outputs, targets)
