"""Models that change or take away in a late step what they were loaded with, besides their weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

#: The step in which something changes.
LATE = 5
KINDS = (
    *("attribute", "attribute that becomes a buffer", "attribute that becomes a passing buffer"),
    *("buffer", "buffer as None", "passing buffer"),
    *("passing buffer that is written", "passing buffer that is replaced"),
)


class Takes(nn.Module):
    """Multiplies by what ``kind`` says; later that is gone, or is another number."""

    factor: Any

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
        self.kind, self.steps = kind, 0
        if kind.startswith("attribute"):
            self.factor = 1.5
        else:
            factor = torch.full((), 1.5, dtype=torch.float64)
            self.register_buffer("factor", factor, persistent=not kind.startswith("passing"))
        self.given = self.factor  # the same tensor, if it is one

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        if self.training and torch.is_grad_enabled():
            self.steps += 1
            if self.steps == LATE:
                self._change()
        factor = getattr(self, "factor", 0.5)
        found = self.last(torch.tanh(self.first(x))) * (0.8 if factor is None else factor)
        return found + self.given  # type: ignore[no-any-return]

    def _change(self) -> None:
        if self.kind == "buffer as None":
            self.factor = None
        elif self.kind.endswith("written"):
            self.factor.fill_(0.7)
        elif self.kind.endswith("replaced"):
            self.factor = torch.full_like(self.factor, 0.7)
        else:
            del self.factor
            if self.kind.startswith("attribute that"):
                passing = self.kind.endswith("passing buffer")
                self.register_buffer("factor", torch.full((), 0.7), persistent=not passing)


def model(kind: str) -> nn.Module:
    """The same one each time."""
    torch.manual_seed(1)
    return Takes(kind)


def data() -> DataLoader[Any]:
    """Six batches."""
    generator = torch.Generator().manual_seed(2)
    samples = TensorDataset(torch.randn(24, 4, generator=generator), torch.randn(24, 1, generator=generator))
    return DataLoader(samples, batch_size=4)


def plain(kind: str, epochs: int) -> tuple[nn.Module, list[float]]:
    """What a loop that knows nothing of Saturn trains, and its losses."""
    trained, losses = model(kind).double(), []
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    for _ in range(epochs):
        for inputs, targets in data():
            loss = nn.functional.mse_loss(trained(inputs.double()), targets.double())
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(float(loss.detach()))
    return trained, losses
