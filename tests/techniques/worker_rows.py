"""Data that started workers import: nothing but torch, since each takes its own import."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info


class Rows(Dataset[Any]):
    """Rows that each follow from their number."""

    def __len__(self) -> int:
        return 18

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(8, generator=generator), torch.randint(0, 5, (), generator=generator)


class Stream(IterableDataset[Any]):
    """The same rows, of which each worker reads its part."""

    def __iter__(self) -> Any:
        info = get_worker_info()
        number, count = (0, 1) if info is None else (info.id, info.num_workers)
        return (Rows()[index] for index in range(number, 18, count))


def rows(stream: bool = False, **settings: Any) -> DataLoader[Any]:
    return DataLoader(Stream() if stream else Rows(), batch_size=6, **settings)
