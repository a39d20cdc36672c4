"""Models and losses that are hard to cut into stages."""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.nn.functional import cross_entropy


class Pair(nn.Module):
    """A block that takes and returns a tensor, a detached one of another shape, and a number."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.linear = nn.Linear(before, after)

    def forward(
        self, x: torch.Tensor, place: int, extra: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, int, dict[str, torch.Tensor]]:
        x = torch.tanh(self.linear(x.T.contiguous().T if place % 2 else x)) + extra["mean"]
        return x.T.contiguous().T, place + 1, {"mean": x.mean(1, keepdim=True), "signs": x.detach() > 0}


class Odd(nn.Module):
    """Blocks of several widths that hand on tuples; tied, frozen and idle weights; layers in between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        widths = [8, 6, 6, 8, 6, 6]
        self.first = nn.Linear(16, 8)
        self.blocks = nn.ModuleList(Pair(a, b) for a, b in itertools.pairwise(widths))
        self.between = nn.ModuleList(nn.LayerNorm(width) for width in widths[1:])
        self.last = nn.Linear(6, 5)
        self.idle = nn.Linear(3, 3)
        self.blocks[4].linear.weight = self.blocks[1].linear.weight
        self.between[2].weight = self.first.bias
        self.blocks[0].requires_grad_(False)
        self.last.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        start = self.first(x)
        x, place, extra = start, 0, {"mean": start.mean(1, keepdim=True), "signs": start > 0}
        for block, norm in zip(self.blocks, self.between, strict=True):
            x, place, extra = block(x, place, extra)
            x = norm(x) + place
            x = torch.where(extra["signs"], x, 0.5 * x)
        return self.last(x + start.sum(1, keepdim=True))


class Recurrent(nn.Module):
    """A stack of GRUs, which return their output and their state, over the numbers of each sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.first = nn.GRU(1, 8, batch_first=True)
        self.layers = nn.ModuleList(nn.GRU(8, 8, batch_first=True) for _ in range(3))
        self.last = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = self.first(x[..., None])
        for layer in self.layers:
            x, state = layer(x)
        return self.last(x[:, -1] + state[0])


def narrowing() -> nn.Module:
    """Layers in a row of which no two are alike."""
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 5)
    )


def mean_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs, targets)


def loss_of_whole_batches(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if len(outputs) < 4:
        raise ValueError("fewer than four samples")
    return cross_entropy(outputs, targets)
