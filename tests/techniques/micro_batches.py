"""Accumulation as plain PyTorch does it: losses and gradients of micro-batches are averaged by samples.

Nothing of Saturn is imported here.
"""

from __future__ import annotations

from typing import Any

import normed
import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import DataLoader

ACCUMULATE, EPOCHS, LR, SAMPLES = 2, 2, 0.05, 22


def data(samples: int = SAMPLES) -> DataLoader[Any]:
    """Batches of 6, and one of 4: parts of 3 and of 2."""
    return normed.pictures(samples)


def contrastive() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))


def contrastive_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The other samples of the batch are what each is told apart from."""
    similar = normalize(outputs) @ normalize(outputs.flip(1)).T
    return cross_entropy(4 * similar, torch.arange(len(outputs)))


class Codebook(nn.Module):
    """Vectors that follow what they are nearest to, in every forward pass (VQ-VAE)."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(16, 4), nn.Linear(4, 3)
        self.register_buffer("codes", torch.randn(5, 4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.encode(x.flatten(1))
        nearest = torch.cdist(z, self.codes).argmin(1)
        if self.training:
            with torch.no_grad():
                for code in nearest.unique():
                    self.codes[code].lerp_(z[nearest == code].mean(0), 0.3)
        chosen = self.codes[nearest]
        return self.decode(z + (chosen - z).detach())


#: Of each job its model and its loss.
JOBS = {
    "cnn": (normed.cnn, normed.loss),
    "spectral": (normed.spectral, normed.loss),
    "teacher": (normed.teacher, normed.loss),
    "averaging": (normed.averaging, normed.loss),
    "codebook": (Codebook, normed.loss),
    "contrastive": (contrastive, contrastive_loss),
}


def model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return JOBS[name][0]()


def plain(name: str) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses by step and of the evaluations of whole batches, weights and buffers."""
    trained, loss_of = model(name).double(), JOBS[name][1]
    optimizer = torch.optim.SGD(trained.parameters(), lr=LR, momentum=0.9)
    losses, evaluations = [], []
    for _ in range(EPOCHS):
        trained.train()
        for x, y in data():
            total = 0.0
            for rows in torch.arange(len(x)).tensor_split(ACCUMULATE):
                loss = loss_of(trained(x[rows]), y[rows]) * (len(rows) / len(x))
                loss.backward()
                total += loss.item()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total)
        trained.eval()
        with torch.no_grad():
            evaluations.append(sum(len(x) * loss_of(trained(x), y).item() for x, y in data()) / SAMPLES)
    return losses, evaluations, trained.state_dict()
