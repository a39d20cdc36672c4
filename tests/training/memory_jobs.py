"""A job whose memory is mostly weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def wide(width: int, depth: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


class Attending(nn.Module):
    """One attention with dropout, by torch's function or its module."""

    def __init__(self, width: int, heads: int, as_module: bool) -> None:
        super().__init__()
        self.heads = heads
        self.inputs = nn.Linear(width, 3 * width)
        self.module = nn.MultiheadAttention(width, heads, 0.1, batch_first=True) if as_module else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.module is not None:
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
            return self.module(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]
        parts = self.inputs(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(*parts, is_causal=True, dropout_p=0.1)
        return attended.transpose(1, 2).flatten(-2)


def sequences(width: int, tokens: int, batch_size: int) -> Any:
    x = torch.zeros(batch_size, tokens, width)
    return DataLoader(TensorDataset(x, x), batch_size=batch_size)


def rows(width: int, batch_size: int) -> Any:
    x = torch.zeros(16, width)
    return DataLoader(TensorDataset(x, x), batch_size=batch_size)


def mean(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().mean()
