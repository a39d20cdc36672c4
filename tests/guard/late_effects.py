"""Models whose steps depend on what the steps that are compared do not reach: counts, and large gradients."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from odd_models import Blocks
from torch import nn
from torch.nn.functional import cross_entropy

SEEN = 0
THOUSANDS = 0.0


class Kept:
    """What an object of one's own keeps."""

    def __init__(self) -> None:
        self.seen = 0


class CountsSamples(nn.Module):
    """From some number of samples on it halves what it is given; where it keeps that number ``kind`` says."""

    of_class = 0

    def __init__(self, kind: str, at: int = 10**6) -> None:
        super().__init__()
        self.kind, self.at = kind, at
        self.numbers = {"seen": 0}
        self.objects = [Kept()]
        self.settings = SimpleNamespace(seen=0)
        self.tensor = torch.zeros((), dtype=torch.long)
        self.thousands = torch.zeros(1)
        self.of_numpy = np.float32(0)

    def count(self, samples: int) -> int:
        global SEEN, THOUSANDS
        if self.kind == "float":
            THOUSANDS += samples / 1000
            return round(1000 * THOUSANDS)
        if self.kind == "numpy":
            self.of_numpy += np.float32(samples)
            return int(self.of_numpy)
        if self.kind == "float tensor":
            self.thousands += samples / 1000
            return round(1000 * float(self.thousands))
        if self.kind == "global":
            SEEN += samples
            return SEEN
        if self.kind == "class":
            CountsSamples.of_class += samples
            return CountsSamples.of_class
        if self.kind == "dict":
            self.numbers["seen"] += samples
            return self.numbers["seen"]
        if self.kind == "object":
            self.objects[0].seen += samples
            return self.objects[0].seen
        if self.kind == "namespace":
            self.settings.seen += samples
            return int(self.settings.seen)
        self.tensor += samples
        return int(self.tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2 if self.training and self.count(len(x)) >= self.at else x


class CountsPasses(CountsSamples):
    """It counts the passes, which ranks that share a batch make as one device does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2 if self.training and self.count(1) >= self.at else x


class AddsUp(nn.Module):
    """Notes of its own: sums of what it is given, and of seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.total, self.seconds = time.perf_counter(), 0.0, 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total += float(x.detach().abs().sum())
        self.seconds += time.perf_counter() - self.began
        return x


def adds_up() -> nn.Module:
    return Blocks(AddsUp())


def counts_samples(kind: str) -> nn.Module:
    return Blocks(CountsSamples(kind))


def counts_passes(kind: str) -> nn.Module:
    return Blocks(CountsPasses(kind))


class OwnSteps(nn.Module):
    """A training step of its own that counts the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Blocks(CountsSamples("global")).double()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return cross_entropy(self.inner(batch[0].double()), batch[1].clamp(min=0))


class Straight(torch.autograd.Function):
    """The identity, of which large gradients are clamped."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.clamp(-1, 1)


class Clamps(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Straight.apply(x)  # type: ignore[no-untyped-call,no-any-return]


def clamps(where: str) -> nn.Module:
    """Gradients that are larger than all there are at first are clamped, or noise is added to them."""
    if where == "states":
        return Blocks(Clamps())
    model = Blocks(nn.Identity())
    for parameter in model.parameters():
        if where == "hooks":
            parameter.register_hook(lambda gradient: gradient.clamp(-100, 100))  # type: ignore[no-untyped-call]
        elif where == "hooks after it is added up":
            parameter.register_post_accumulate_grad_hook(_clamp)  # type: ignore[no-untyped-call]
        else:
            parameter.register_hook(lambda gradient: gradient + 0.1 * torch.randn_like(gradient))  # type: ignore[no-untyped-call]
    return model


def _clamp(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-100, 100)


def masks() -> nn.Module:
    """Hooks that let a part of each gradient through."""
    model = Blocks(nn.Identity())
    for parameter in model.parameters():
        mask = torch.arange(parameter.numel()).reshape(parameter.shape) % 2
        parameter.register_hook(lambda gradient, mask=mask: gradient * mask)  # type: ignore[no-untyped-call]
    return model


class Narrow(nn.Module):
    """Weights in float16, of whose gradients some are next to nothing there."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        wide = [layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.ReLU())]
        layers = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), *wide, nn.Linear(32, 10))
        self.layers = layers.to(torch.float16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(x.to(torch.float16))
        return logits.float() / 100
