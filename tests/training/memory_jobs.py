"""A job whose memory is mostly weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def wide(width: int, depth: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


def rows(width: int, batch_size: int) -> Any:
    x = torch.zeros(16, width)
    return DataLoader(TensorDataset(x, x), batch_size=batch_size)


def mean(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().mean()
