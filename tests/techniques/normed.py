"""Models with BatchNorms of all kinds, and data whose last batch leaves a third rank without samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import batch_norm, cross_entropy
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import DataLoader, TensorDataset


class Act(nn.BatchNorm2d):
    """A BatchNorm with a forward pass of its own, as timm has them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.3, self.eps
        )
        return torch.relu(x)


class OwnStatistics(nn.BatchNorm1d):
    """A BatchNorm that nobody else can compute."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(0) if self.training else self.running_mean
        return (x - mean) * self.weight + self.bias


class Frozen(nn.Sequential):
    """Keeps its BatchNorm as it is, whatever mode the model is in."""

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self[1].eval()
        return self


class Block(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.norm(self.conv(x)))


def cnn(synced: bool = False) -> nn.Module:
    """Norms in and outside of blocks: with a moving and a cumulative average, without weights, frozen."""
    torch.manual_seed(0)
    return nn.Sequential(
        Frozen(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)),
        Block(nn.BatchNorm2d(4)),
        Block(nn.BatchNorm2d(4, momentum=None)),
        Block(Act(4)),
        Block(nn.SyncBatchNorm(4) if synced else nn.BatchNorm2d(4)),
        Block(nn.InstanceNorm2d(4, affine=True)),
        nn.Flatten(2),
        nn.BatchNorm1d(4, affine=False),
        nn.Flatten(),
        nn.Linear(4 * 16, 8),
        nn.BatchNorm1d(8, track_running_stats=False),
        nn.Linear(8, 3),
    )


def synced() -> nn.Module:
    """The same with a norm of torch's that works on GPUs alone."""
    return cnn(synced=True)


class Averaging(nn.Module):
    """Keeps the mean of what it saw last, for evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen = x.detach().mean()
            return x
        return x - self.seen


class Caching(nn.Module):
    """Fills a table when it is first used."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(16), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table = torch.arange(16).to(x)
        return x + self.table


class ByDomain(nn.Module):
    """Has a norm for each of two domains, which the samples tell, and takes those it has samples for."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = torch.zeros_like(x)
        for domain, norm in enumerate(self.norms):
            rows = (x[:, 0] > 3) == bool(domain)
            if rows.any():
                normed[rows] = norm(x[rows])
        return normed


class Teacher(nn.Module):
    """A frozen copy of a layer that follows it in every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(16, 3)
        self.teacher = nn.Linear(16, 3).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.teacher.weight.lerp_(self.student.weight, 0.1)
        return self.student(x) + self.teacher(x)


def teacher() -> nn.Module:
    return nn.Sequential(nn.Flatten(), Teacher())


def by_domain() -> nn.Module:
    return nn.Sequential(nn.Flatten(), ByDomain(), nn.Linear(16, 3))


def averaging() -> nn.Module:
    return nn.Sequential(nn.Flatten(), Averaging(), nn.Linear(16, 3))


def caching() -> nn.Module:
    return nn.Sequential(nn.Flatten(), Caching(), nn.Linear(16, 3))


def spectral() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), spectral_norm(nn.Linear(16, 8)), nn.Linear(8, 3))


def own_statistics() -> nn.Module:
    return nn.Sequential(nn.Flatten(), OwnStatistics(16), nn.Linear(16, 3))


def pictures(samples: int = 20, batch_size: int = 6) -> DataLoader[Any]:
    """Noise in order: batches of 6, and one of 2."""
    generator = torch.Generator().manual_seed(4)
    x = 3 + torch.randn(samples, 1, 4, 4, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(x, torch.arange(samples) % 3), batch_size=batch_size)


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs, targets)


def plain(epochs: int, lr: float) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses by step and of the evaluations, weights and buffers: a loop of plain PyTorch."""
    model = cnn().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    losses, evaluations = [], []
    for _ in range(epochs):
        model.train()
        for x, y in pictures():
            total = cross_entropy(model(x), y)
            total.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total.item())
        model.eval()
        with torch.no_grad():
            sums = [cross_entropy(model(x), y, reduction="sum").item() for x, y in pictures()]
        evaluations.append(sum(sums) / 20)
    return losses, evaluations, model.state_dict()
