"""A model whose gradients are sparse, some or all of them."""

from __future__ import annotations

import torch
from torch import nn


class Words(nn.Module):
    """It looks up rows, some of them several times in a batch, by the largest of a sample's numbers.

    :param only: whether nothing else is trained.
    """

    def __init__(self, *, only: bool) -> None:
        super().__init__()
        self.rows = nn.Embedding(6, 4, sparse=True)
        self.enter = nn.Linear(6, 6).requires_grad_(not only)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        found: torch.Tensor = self.rows(x.topk(2).indices).sum(1)
        return found * x.mean(1, keepdim=True)


def some() -> nn.Module:
    return Words(only=False)


def only() -> nn.Module:
    return Words(only=True)
