"""Models that count their passes, and keep the count in places of all kinds."""

from __future__ import annotations

from typing import Any

import torch
from odd_models import Blocks
from torch import nn


class Growing(Blocks):
    """A factor that grows with each pass; how many there were is kept where ``kind`` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "buffer":
            self.register_buffer("passes", torch.zeros(()))
        elif kind == "passing buffer":
            self.register_buffer("passes", torch.zeros(()), persistent=False)
        elif kind == "large passing buffer":
            self.register_buffer("passes", torch.zeros(2**21, 4), persistent=False)
        elif kind == "slots":
            self.kept = Slots()
        elif kind == "shaped by the first batch":
            self.register_buffer("passes", torch.zeros(0))
        elif kind == "closure":
            passes = [0]

            def grow(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
                passes[0] += module.training
                return output * (1 + 0.1 * passes[0])

            self.register_forward_hook(grow)
        elif kind == "closure that keeps nothing":
            self.register_forward_hook(lambda module, inputs, output: output + self.enter(inputs[0])[:, :4])
        elif kind == "module as a default":
            self.enter.forward = lambda x, own=self.enter: nn.functional.linear(x, own.weight)  # type: ignore[method-assign]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.kind in ("buffer", "passing buffer"):
            self.passes += self.training
            return y * (1 + 0.1 * self.passes)
        if self.kind == "large passing buffer":
            self.passes += self.training
            return y * (1 + 0.1 * self.passes[0])
        if self.kind == "slots":
            self.kept.passes += self.training
            return y * (1 + 0.1 * self.kept.passes)
        if self.kind == "shaped by the first batch":
            if not len(self.passes):
                self.passes.resize_(4).fill_(0)
            self.passes += self.training
            return y * (1 + 0.1 * self.passes)
        return y


class Slots:
    __slots__ = ("passes",)

    def __init__(self) -> None:
        self.passes = 0


def growing(kind: str) -> nn.Module:
    return Growing(kind)
