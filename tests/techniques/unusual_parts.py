"""Models with unusual parts: hooks, checkpoints of their own, parametrizations, changes in place."""

from __future__ import annotations

from typing import Any

import torch
from odd import Block, Chain
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import orthogonal, weight_norm
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from unusual_registry import DEPTH, blocks, unusual


class Checkpointed(Chain):
    def __init__(self, blocks: list[nn.Module], how: str) -> None:
        super().__init__(blocks)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(x)
        if self.how == "sequential":
            x = checkpoint_sequential(nn.Sequential(*self.blocks), 2, x, use_reentrant=False)
        else:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=self.how == "reentrant")
        return self.end(x)


class CheckpointedInside(Block):
    def __init__(self, reentrant: bool) -> None:
        super().__init__(8)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


@unusual("forward hooks")
def forward_hooks() -> nn.Module:
    """Hooks change what goes into and comes out of blocks, of a layer in them, and of the model."""
    made = Chain(blocks())
    made.blocks[1].register_forward_pre_hook(lambda module, args: (1.1 * args[0],))
    made.blocks[2].register_forward_hook(lambda module, args, output: 0.9 * output)
    made.blocks[0].norm.register_forward_hook(lambda module, args, output: output + 0.1)
    made.register_forward_hook(lambda module, args, output: 2 * output)
    made.register_forward_pre_hook(lambda module, args: (args[0] + 0.1,))
    return made


def backward_hooks(where: str) -> nn.Module:
    made = Chain(blocks())
    found = {
        "a block": made.blocks[1],
        "a layer": made.blocks[1].norm,
        "the model": made,
        "the last layer": made.end,
    }
    found[where].register_full_backward_hook(
        lambda module, into, out: tuple(0.5 * g for g in into if g is not None) or None
    )
    return made


@unusual("a backward pre-hook on a block")
def backward_pre_hook() -> nn.Module:
    made = Chain(blocks())
    made.blocks[1].register_full_backward_pre_hook(lambda module, out: tuple(0.5 * g for g in out))
    return made


@unusual("hooks on activations")
class HookedActivations(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
            if x.requires_grad:
                x.register_hook(lambda gradient: 0.5 * gradient)
        return self.end(x)


class Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


@unusual("parametrizations")
def parametrized() -> nn.Module:
    made = Chain([nn.Sequential(Block(8), nn.Linear(8, 8)) for _ in range(DEPTH)])
    for number, block in enumerate(made.blocks):
        (weight_norm, orthogonal, lambda m: parametrize.register_parametrization(m, "weight", Symmetric()))[
            number % 3
        ](block[1])
    weight_norm(made.end)
    return made


class InPlace(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += super().forward(x.clone())
        return x.mul_(0.5)


@unusual("blocks that change their inputs")
def in_place() -> nn.Module:
    return Chain([InPlace(8) for _ in range(DEPTH)])


@unusual("a model that changes its inputs")
class ChangesInputs(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x -= x.mean(-1, keepdim=True)
        x.mul_(2)
        return super().forward(x)


@unusual("gives what it trains as its parameters")
class GivesTrained(Chain):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__(blocks)
        for module in (self.start, self.blocks[1]):
            module.requires_grad_(False)

    def parameters(self, recurse: bool = True) -> Any:
        return filter(lambda p: p.requires_grad, super().parameters(recurse))


class Adapted(nn.Module):
    """A frozen layer with an adapter, which is merged into its weights to evaluate."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.merged = False

    def train(self, mode: bool = True) -> Adapted:
        if self.merged == mode:
            sign = -1 if mode else 1
            self.base.weight.data += sign * self.up.weight.detach() @ self.down.weight.detach()
            self.merged = not mode
        return super().train(mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + (0 if self.merged else self.up(self.down(x))))


@unusual("adapters merged to evaluate")
def adapted() -> nn.Module:
    return Chain([Adapted() for _ in range(DEPTH)])
