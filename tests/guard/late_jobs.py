"""Jobs whose samples are coupled only some steps after training began, each in a way of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from odd_models import Blocks
from torch import nn
from torch.nn.functional import cross_entropy, dropout, normalize

CALLS = {"loss": 0}


class CoupledLater(nn.Module):
    """From some call on it lets samples see each other; it counts calls in a buffer, or in an attribute."""

    def __init__(self, at: int, buffer: bool, times: float = 1.0) -> None:
        super().__init__()
        self.at, self.times = at, times
        if buffer:
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        else:
            self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls = self.calls + 1
        return x + self.times * x.mean(0) if int(self.calls) >= self.at else x


def coupled_later(at: int = 20, buffer: bool = True) -> nn.Module:
    return Blocks(CoupledLater(at, buffer))


class Remembers(nn.Module):
    """It counts, drops, normalises and keeps an average: all that a look must leave as it is."""

    def __init__(self, norm: bool, counts: bool) -> None:
        super().__init__()
        self.counts = counts
        self.calls, self.history = 0, [0.0]
        self.norm = nn.BatchNorm1d(8) if norm else nn.LayerNorm(8)
        self.teacher = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.counts:
            self.calls += 1
            self.history.append(float(self.calls))
            with torch.no_grad():
                self.teacher.mul_(0.9).add_(0.01 * self.calls)
        return dropout(self.norm(x), 0.2, self.training) * (1 + self.calls / 100) + self.teacher


class Follows(nn.Module):
    """A layer that follows another one gets no gradient: in place, or by what is put into the place of its
    data, as in momentum contrast (He et al., 2020)."""

    def __init__(self, in_place: bool, frozen: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.follower = nn.Linear(6, 6).requires_grad_(not frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for own, other in zip(self.follower.parameters(), self.blocks[0].parameters(), strict=True):
                if self.in_place:
                    own.lerp_(other, 0.3)
                else:
                    own.data = own.data * 0.7 + other.data * 0.3
            target = self.follower(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x + target


def follows(in_place: bool, frozen: bool) -> nn.Module:
    torch.manual_seed(1)
    return Follows(in_place, frozen)


def remembers(norm: bool = False, counts: bool = True) -> nn.Module:
    model = Blocks(Remembers(norm, counts))
    model.tp_plan = {"blocks.*": "colwise_rep"}
    return model


def row(**unused: Any) -> nn.Module:
    """Blocks that a pipeline can cut anywhere."""
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2)) for _ in range(3)]
    return nn.Sequential(nn.Linear(6, 8), *blocks, nn.Linear(8, 4))


def calls_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    CALLS["loss"] += torch.is_grad_enabled()
    return cross_entropy(outputs, targets.clamp(min=0)) * (1 + CALLS["loss"] / 100)


def counting_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """It counts its calls in a global, and compares samples from the 20th on."""
    CALLS["loss"] += torch.is_grad_enabled()
    loss = cross_entropy(outputs, targets.clamp(min=0))
    if CALLS["loss"] < 20:
        return loss
    similar = normalize(outputs) @ normalize(outputs.flip(1)).T
    return loss + similar.square().mean()


def masked_mean(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A mean by hand over some samples only."""
    mask = (targets >= 0).to(outputs)
    losses = cross_entropy(outputs, targets.clamp(min=0), reduction="none")
    return (losses * mask).sum() / mask.sum().clamp(min=1)


class Stream:
    """Batches in which the first half of the samples has no targets, from the 16th on."""

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(3)
        for number in range(40):
            inputs = torch.randn(6, 6, generator=generator)
            targets = torch.randint(0, 4, (6,), generator=generator)
            if number >= 16:
                targets[: 1 + number % 3] = -100
            yield inputs, targets


def stream() -> Stream:
    return Stream()


class ChangesInputs(nn.Module):
    """Changes what it is given in place."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = row()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x.mul_(0.9).add_(0.1))


def kept_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches that are the same tensors in each epoch, in the format that the model computes in."""
    return [(inputs.double(), targets) for inputs, targets in Stream()][:3]
