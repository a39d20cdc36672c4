"""Losses of which the mean is clamped or left out where it is large, and steps that clamp gradients."""

from __future__ import annotations

from typing import Any

import torch
from late_effects import Clamps
from odd_models import Blocks
from torch import nn
from torch.autograd import backward
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint


def _each(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs, targets.clamp(min=0), reduction="none")


def clamped(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean is clamped where it is ten times what it is at first."""
    return _each(outputs, targets).mean().clamp(max=20.0)


def clamped_far(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean is clamped where it is a thousand times what it is at first."""
    return _each(outputs, targets).mean().clamp(max=2000.0)


def at_least(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """It is trained no further than this, as with free bits."""
    return torch.maximum(_each(outputs, targets).sum() / len(outputs), torch.tensor(0.1))


def left_out(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Batches with a large loss are left out."""
    loss = torch.stack([one.squeeze() for one in _each(outputs, targets).split(1)]).mean()
    return loss * 0 if loss.item() > 20 else loss


def each_clamped(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The losses of single samples are, in a loop."""
    losses = [one.squeeze().clamp(max=20.0) for one in _each(outputs, targets).split(1)]
    return torch.stack(losses).mean()


def weighed(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A mean over weights that are never all 0, and one that is no number if it ever should be."""
    weights = torch.ones(len(outputs), dtype=outputs.dtype)
    loss = (_each(outputs, targets) * weights).sum() / weights.sum().clamp(min=1)
    return torch.nan_to_num(loss.clamp(min=0.0)) / 2


def penalised(outputs: tuple[torch.Tensor, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    """How much the outputs change with the inputs is punished: the gradient of one number, their sum."""
    predicted, inputs = outputs
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(predicted.sum(), inputs, create_graph=True)
    return _each(predicted, targets).mean() + slope.square().sum(-1).sqrt().sub(1).square().mean()


def clamped_penalty(outputs: tuple[torch.Tensor, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    predicted, inputs = outputs
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(predicted.sum(), inputs, create_graph=True)
    return _each(predicted, targets).mean() + slope.square().sum(-1).mean().clamp(max=100.0)


class WithInputs(Blocks):
    """What it predicts, and what its gradient is taken by."""

    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        x = x.clone().requires_grad_()
        with torch.enable_grad():
            return super().forward(x), x


class OwnSteps(nn.Module):
    """A training step of its own.

    :param kind: what it does besides.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner = Blocks(Clamps() if kind == "states" else nn.Identity()).double()
        self.log_weights = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.kind = kind
        self.automatic_optimization = kind not in ("by hand", "torch.autograd's")
        if kind in ("hooks", "torch.autograd's"):
            for parameter in self.inner.parameters():
                parameter.register_hook(lambda gradient: gradient.clamp(-100, 100))  # type: ignore[no-untyped-call]

    def configure_optimizers(self) -> Any:
        self.optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return self.optimizer

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = batch[0].double().requires_grad_(self.kind == "recomputed")
        out = checkpoint(self.inner, x, use_reentrant=True) if self.kind == "recomputed" else self.inner(x)
        loss = _each(out, batch[1]).mean()
        if self.kind == "loss":
            return loss.clamp(max=20.0)
        if self.kind == "weights":  # of the loss, learned, and a penalty on weights that is no line
            penalty = sum(p.pow(2).sum().sqrt() for p in self.inner.parameters())
            return loss * torch.exp(-self.log_weights[0]) + self.log_weights[0] + 0.01 * penalty
        if self.kind == "by hand":
            # Of the whole batch's gradients, which are there by then.
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            for parameter in self.inner.parameters():
                assert parameter.grad is not None
                parameter.grad.clamp_(-1e-3, 1e-3)
            self.optimizer.step()
        if self.kind == "torch.autograd's":
            self.optimizer.zero_grad()
            backward(loss)
            self.optimizer.step()
        return loss
