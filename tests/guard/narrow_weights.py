"""Adapters in float32 on frozen weights in 16 bits, which compute together under autocast alone."""

from __future__ import annotations

import torch
from torch import nn


class Adapted(nn.Module):
    """A frozen layer in bfloat16, and a trained one of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).to(torch.bfloat16).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2), nn.Linear(2, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.base(x) + self.up(self.down(x))
        return x + torch.tanh(added)


def adapted() -> nn.Module:
    """Four such blocks between layers in float32."""
    return nn.Sequential(nn.Linear(6, 8), *(Adapted() for _ in range(4)), nn.Linear(8, 4))
