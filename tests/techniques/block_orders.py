"""Models that go through their blocks in other orders, or several times."""

from __future__ import annotations

import torch
from odd import Block, Chain
from torch import nn


class Turned(Chain):
    """It computes its blocks from the last to the first where the first sample of the batch says so."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        backwards = bool(x[0, 0] < self.start.bias.new_zeros(()))
        x = self.start(x)
        for block in reversed(self.blocks) if backwards else self.blocks:
            x = block(x)
        return self.end(x)


def turned() -> nn.Module:
    torch.manual_seed(0)
    return Turned([Block(8) for _ in range(3)])


class Weighed(Chain):
    """It computes the gradients' way through its blocks in an order that depends on the samples."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = bool(x[0, 0] < 0)
        x = self.start(x)
        first, second, *others = [block(x) for block in self.blocks]
        x = first + second.detach() + sum(others) if turned else second + first.detach() + sum(others)
        return self.end(x)


def weighed() -> nn.Module:
    torch.manual_seed(0)
    return Weighed([Block(8) for _ in range(3)])


class SkippingAgain(Chain):
    """Goes through its blocks twice; all but the first it computes for some samples alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        depths = (x[:, 0] * 1000).long().abs()
        x = self.start(x)
        for time in range(2):
            for number, block in enumerate(self.blocks):
                rows = (depths + time) % (2 * number + 1) == 0
                if rows.any():
                    x = x.index_put((rows,), block(x[rows]))
        return self.end(x)


def skipping_again() -> nn.Module:
    torch.manual_seed(0)
    return SkippingAgain([Block(8) for _ in range(4)])


class Viewed(Chain):
    """Goes through its blocks for several views of each sample, one of which has no gradients."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + super().forward(x.flip(1)).detach().tanh() * super().forward(x.flip(1))


def viewed() -> nn.Module:
    torch.manual_seed(0)
    return Viewed([Block(8) for _ in range(3)])
