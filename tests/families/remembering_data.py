"""Data that remember: samplers, datasets and streams that draw, count or shuffle by what they keep.

Three epochs of two batches, of 5 samples and 1; what is resumed goes on at the second epoch.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, WeightedRandomSampler, get_worker_info

from families import data
from families.family import Family, register
from families.plain import WIDTH, stack

KIND = "data that remember"
SAMPLES = data.BATCH + 1


class Vectors(data.Rows):
    """Vectors and classes."""

    offset = 0.0

    def __init__(self, samples: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(7)
        super().__init__([(torch.randn(WIDTH, generator=generator), number % 4) for number in range(samples)])

    def __getitem__(self, index: int) -> Any:
        x, target = super().__getitem__(index)
        return x * self.factor() + self.offset, target

    def factor(self) -> float:
        return 1.0


class Draws(Vectors):
    """Augments by a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(3)

    def factor(self) -> float:
        return float(self.generator.normal())


class Counts(Vectors):
    """Becomes harder with each sample."""

    calls = 0

    def factor(self) -> float:
        self.calls += 1
        return 1 + self.calls / 10


class Mixes(Vectors):
    """Mixes each sample with the one before (as mosaics do with several)."""

    def __init__(self) -> None:
        super().__init__()
        self.before: deque[Any] = deque(maxlen=1)

    def __getitem__(self, index: int) -> Any:
        x, target = super().__getitem__(index)
        mixed = x + 0.3 * self.before[0] if self.before else x
        self.before.append(x)
        return mixed, target


class Grows(Vectors):
    """Has more samples in each epoch, of which it is told."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return super().__len__() - 2 + self.epoch


class ByEpoch(Sampler[int]):
    """Shuffles by the epoch that it is told."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch)).tolist())


class CountsEpochs(ByEpoch):
    """Counts them itself."""

    def __iter__(self) -> Iterator[int]:
        order = super().__iter__()
        self.epoch += 1
        return order


class Buckets(Sampler[list[int]]):
    """Makes batches by a generator of its own."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[list[int]]:
        order = self.generator.permutation(SAMPLES).tolist()
        return iter([order[:2], order[2:]])


class Files(IterableDataset[Any]):
    """Shuffles its files in place, and shares them out to workers."""

    def __init__(self) -> None:
        self.files, self.generator, self.rows = list(range(SAMPLES)), random.Random(1), Vectors()

    def __iter__(self) -> Iterator[Any]:
        self.generator.shuffle(self.files)
        worker = get_worker_info()
        files = self.files[worker.id :: worker.num_workers] if worker else self.files
        return iter([self.rows[number] for number in files])


def shift(number: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.offset = 0.5 + number  # type: ignore[attr-defined]


def weighted() -> Any:
    generator = torch.Generator().manual_seed(5)
    sampler = WeightedRandomSampler([1.0] * SAMPLES, SAMPLES, generator=generator)
    return DataLoader(Vectors(), data.BATCH, sampler=sampler)


LOADERS: dict[str, Callable[[], Any]] = {
    "weighted samples, by a generator": weighted,
    "a sampler that is told the epoch": lambda: DataLoader(Vectors(), data.BATCH, sampler=ByEpoch()),
    "a sampler that counts epochs": lambda: DataLoader(Vectors(), data.BATCH, sampler=CountsEpochs()),
    "batches of one's own": lambda: DataLoader(Vectors(), batch_sampler=Buckets()),
    "a dataset that draws": lambda: DataLoader(Draws(), data.BATCH),
    "a dataset that counts": lambda: DataLoader(Counts(), data.BATCH),
    "a dataset that mixes": lambda: DataLoader(Mixes(), data.BATCH),
    "a dataset that grows": lambda: DataLoader(Grows(SAMPLES + 2), data.BATCH),
    "files shuffled in place": lambda: DataLoader(Files(), data.BATCH),
    "files, by two workers": lambda: DataLoader(Files(), 3, num_workers=2),
    "workers that change their dataset": lambda: DataLoader(
        Vectors(), data.BATCH, num_workers=2, worker_init_fn=shift
    ),
}
register(
    *(
        Family(name, KIND, stack, loader, "families.plain:class_loss", recipe={"epochs": 3})
        for name, loader in LOADERS.items()
    )
)
