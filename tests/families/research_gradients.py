"""Layers of research code that do something to gradients and weights by hand, and what its models return."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.functional import cross_entropy

from families import data
from families.plain import CLASSES, WIDTH, Block, Stack, stack


def said(**fields: Any) -> Any:
    """Batches as keywords of the model, with ``labels`` of a class each."""
    return data.fields(x=data.normal(WIDTH), labels=data.whole(0, CLASSES), **fields)


class Loss:
    """What a model returns that computes its own loss."""

    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


class LowRank(nn.Module):
    """A frozen layer and an update of low rank beside it, which is 0 at first."""

    def __init__(self, of: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.of = of.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, of.in_features) / 4)
        self.up = nn.Parameter(torch.zeros(of.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.of(x) + x @ self.down.T @ self.up.T


def low_rank() -> nn.Module:
    model = Stack([Block() for _ in range(3)])
    for block in model.blocks:
        block.requires_grad_(False)
        block.up, block.down = LowRank(block.up), LowRank(block.down)
    return model


class InBytes(nn.Module):
    """A frozen layer kept in 8-bit numbers with a scale for each row, and an update of low rank."""

    def __init__(self, of: nn.Linear) -> None:
        super().__init__()
        scale = of.weight.detach().abs().amax(1) / 127
        self.register_buffer("numbers", (of.weight.detach() / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale.half())
        self.bias = nn.Parameter(of.bias.detach().clone())
        self.down = nn.Parameter(torch.randn(2, of.in_features) / 4)
        self.up = nn.Parameter(torch.zeros(of.out_features, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.numbers.to(x.dtype) * self.scale.to(x.dtype)[:, None]
        return functional.linear(x, weight + self.up @ self.down, self.bias)


def in_bytes() -> nn.Module:
    model = Stack([Block() for _ in range(3)])
    for block in model.blocks:
        block.up, block.down = InBytes(block.up), InBytes(block.down)
    return model


class Reverse(torch.autograd.Function):
    """Hands on what it is given, and turns gradients around."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, strength: torch.Tensor) -> torch.Tensor:
        ctx.strength = strength.clone()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return -ctx.strength * gradient, None


class Adversary(nn.Module):
    """Features that a second head shall not tell domains by; more so with each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.body = stack()
        self.domain = nn.Linear(CLASSES, 2)
        self.register_buffer("strength", torch.zeros(()))

    def forward(self, x: torch.Tensor, labels: torch.Tensor, domain: torch.Tensor) -> Loss:
        if self.training:
            self.strength += 0.1
        features = self.body(x)
        told = self.domain(Reverse.apply(features, self.strength))
        return Loss(cross_entropy(features, labels) + cross_entropy(told, domain))


class UnitGradients(torch.autograd.Function):
    """Gradients of samples, each brought to length 1, however small the loss is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / gradient.norm(dim=-1, keepdim=True).clamp(min=1e-12)


class WithUnitGradients(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = stack()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x + 0) if not self.training else UnitGradients.apply(self.body(x))


def clamped_weights() -> nn.Module:
    """Hooks on weights that clamp their gradients."""
    model = stack()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return model


def scaled_after() -> nn.Module:
    """Hooks that scale a gradient once it is there, by its own length."""
    model = stack()

    def scale(parameter: torch.Tensor) -> None:
        parameter.grad.div_(1 + parameter.grad.norm())

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(scale)
    return model


class ClampedStates(nn.Module):
    """Hooks on what blocks return that clamp gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.body = stack()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.body.blocks:
            x = block(x)
            if x.requires_grad:
                x.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
        return self.body.last(x)
