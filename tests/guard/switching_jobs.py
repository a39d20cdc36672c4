"""Models that switch something once, and data that remember what they drew or that a model writes into."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from odd_models import Blocks, vectors
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset

# By its first passes the guard sees it.
_AT = 3


class Once(nn.Module):
    """In one of its passes it switches something for good, or in each pass what it adds is gone after it."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.passes = 0
        hooked = self.hooked()
        if what != "unhooks":
            hooked.remove()
        self.unhook = hooked.remove

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.passes += 1
            if self.passes == _AT:
                self.switch()
            if self.what == "hooks each time":
                self.unhook()
                self.unhook = self.hooked().remove
        found: torch.Tensor = self.norm(self.layer(x))
        return found

    def hooked(self) -> Any:
        return self.layer.weight.register_hook(lambda gradient: gradient * 0.1)  # type: ignore[no-untyped-call]

    def switch(self) -> None:
        if self.what == "freezes":
            self.layer.requires_grad_(False)
        elif self.what == "evaluates":
            self.norm.eval()
        elif self.what == "unhooks":
            self.unhook()
        elif self.what == "hooks":
            self.layer.register_full_backward_hook(lambda *_: None)


def once(what: str) -> nn.Module:
    return Blocks(Once(what))


class Noisy(Dataset[Any]):
    """Noise that is drawn for a sample once."""

    def __init__(self) -> None:
        self.rows: Any = vectors().dataset
        self.noise: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        x, target = self.rows[index]
        return x + self.drawn(index), target

    def drawn(self, index: int) -> torch.Tensor:
        if index not in self.noise:
            self.noise[index] = torch.randn(6)
        return self.noise[index]


@functools.cache
def drawn_once(index: int) -> torch.Tensor:
    return torch.randn(6)


class NoisyOutOfSight(Noisy):
    def drawn(self, index: int) -> torch.Tensor:
        return drawn_once(index)


class NoisyAnew(Noisy):
    def drawn(self, index: int) -> torch.Tensor:
        return torch.randn(6)


class ByTheFirst(Noisy):
    """It moves all samples by the first one that it was asked for."""

    first: torch.Tensor | None = None

    def drawn(self, index: int) -> torch.Tensor:
        if self.first is None:
            self.first = self.rows[index][0]
        return -self.first


def noisy(batch_size: int = 6) -> DataLoader[Any]:
    return DataLoader(Noisy(), batch_size, shuffle=True)


def noisy_out_of_sight(batch_size: int = 6) -> DataLoader[Any]:
    return DataLoader(NoisyOutOfSight(), batch_size, shuffle=True)


class Writes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(0.9) if self.training else x


class WritesFirst(nn.Module):
    """It writes into what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.writes, self.rest = Writes(), Blocks()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.rest(self.writes(x))
        return found


def writes() -> nn.Module:
    return WritesFirst()


def writes_in_a_row() -> nn.Module:
    return nn.Sequential(Writes(), nn.Linear(6, 8), *(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 4))


def doubles(batch_size: int = 6) -> DataLoader[Any]:
    """Batches that are not copied to be trained on in float64."""
    inputs, targets = vectors().dataset.tensors  # type: ignore[attr-defined]
    return DataLoader(TensorDataset(inputs.double(), targets), batch_size)


def kept_batches(batch_size: int = 6) -> list[Any]:
    return [(x.double(), target) for x, target in vectors(batch_size)]


class Refilled:
    """Each batch is filled into the tensors of the one before."""

    def __init__(self) -> None:
        self.batches = kept_batches(4)
        self.own = [torch.zeros_like(part) for part in self.batches[0]]

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            for own, part in zip(self.own, batch, strict=True):
                own.copy_(part)
            yield tuple(self.own)


def refilled() -> Refilled:
    return Refilled()


class Masks(nn.Module):
    """It masks its inputs where they are, as transformers does a spectrogram."""

    def __init__(self) -> None:
        super().__init__()
        self.rest = Blocks()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            x[torch.rand(x.shape) < 0.3] = 0
        found: torch.Tensor = self.rest(x)
        return found


def masks() -> nn.Module:
    return Masks()


def pair_loss(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    losses = cross_entropy(outputs, targets, reduction="sum")
    return losses, (targets != -100).sum()


class GoesBack(nn.Module):
    """It keeps copies of its weights from time to time, and goes half the way back to them."""

    def __init__(self) -> None:
        super().__init__()
        self.rest = Blocks()
        self.passes = 0
        self.kept: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.passes += 1
            if self.passes % 3 == 1:
                self.kept = [p.detach().clone() for p in self.rest.blocks.parameters()]
            elif self.passes % 3 == 0:
                with torch.no_grad():
                    for own, kept in zip(self.rest.blocks.parameters(), self.kept, strict=True):
                        own.lerp_(kept, 0.5)
        found: torch.Tensor = self.rest(x)
        return found


def goes_back() -> nn.Module:
    return GoesBack()


class Waves(nn.Module):
    """Most of its parameters are complex."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(8, 6, dtype=torch.complex128))
        self.second = nn.Parameter(torch.randn(4, 8, dtype=torch.complex128))
        self.bias = nn.Parameter(torch.zeros(4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        waves = x.to(self.first.dtype) @ self.first.T
        found: torch.Tensor = (waves @ self.second.T).abs() + self.bias
        return found


def waves() -> nn.Module:
    return Waves()
