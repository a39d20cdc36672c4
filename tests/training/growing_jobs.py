"""Data of which somebody else decides how many they are: a file says it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset


def table(file: str, batch_size: int = 4) -> DataLoader[Any]:
    x = torch.randn(int(Path(file).read_text()), 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=batch_size, shuffle=True)


def unseeded(file: str) -> DataLoader[Any]:
    """As many samples each time, and others."""
    x = torch.from_numpy(numpy.random.default_rng().normal(size=(int(Path(file).read_text()), 4))).float()
    return DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=4, shuffle=True)


class _Rows(IterableDataset[Any]):
    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


def stream(file: str) -> DataLoader[Any]:
    return DataLoader(_Rows(table(file).dataset), batch_size=4)
