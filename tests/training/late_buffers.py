"""Models that register buffers as they are trained, or have them as None until then."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Late(nn.Module):
    """Adds a running mean of what it computes, which is a buffer from the step ``since`` on.

    :param none: whether the buffer is there as None before.
    """

    def __init__(self, since: int, none: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
        self.since, self.steps = since, 0
        if none:
            self.first.register_buffer("mean", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        found = torch.tanh(self.first(x))
        mean = getattr(self.first, "mean", None)
        if mean is not None:
            found = found + mean
        if self.training and torch.is_grad_enabled():
            self.steps += 1
            if mean is None and self.steps == self.since:
                self.first.register_buffer("mean", found.detach().mean())  # without dimensions
            elif mean is not None:
                self.first.mean = 0.5 * mean + found.detach().mean()
        return self.last(found)  # type: ignore[no-any-return]


def model(since: int, none: bool) -> nn.Module:
    """The same one each time."""
    torch.manual_seed(1)
    return Late(since, none)


def data() -> DataLoader[Any]:
    """Six batches."""
    generator = torch.Generator().manual_seed(2)
    samples = TensorDataset(torch.randn(24, 4, generator=generator), torch.randn(24, 1, generator=generator))
    return DataLoader(samples, batch_size=4)


def plain(since: int, none: bool, epochs: int) -> tuple[nn.Module, list[float]]:
    """What a loop that knows nothing of Saturn trains, and its losses."""
    trained, losses = model(since, none).double(), []
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    for _ in range(epochs):
        for inputs, targets in data():
            loss = nn.functional.mse_loss(trained(inputs.double()), targets.double())
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(float(loss.detach()))
    return trained, losses
