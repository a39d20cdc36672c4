"""Datasets, samplers and functions of data that keep something."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import random
import sqlite3
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    get_worker_info,
)

SIZE, BATCH = 7, 3


class Rows(Dataset[Any]):
    offset = 0.0

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(float(index)) + self.offset


class Draws(Rows):
    def __init__(self, generator: Any) -> None:
        self.draw = {"augment": Augment(generator)}

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) + self.draw["augment"]()


class Augment:
    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __call__(self) -> float:
        return float(
            torch.rand((), generator=self.generator)
            if isinstance(self.generator, torch.Generator)
            else self.generator.random()
        )


class Counts(Rows):
    calls = 0

    def __getitem__(self, index: int) -> Any:
        self.calls += 1
        return super().__getitem__(index) + self.calls / 100


class Mixes(Rows):
    """Mixes a sample with those before it."""

    def __init__(self) -> None:
        self.last: deque[float] = deque(maxlen=2)

    def __getitem__(self, index: int) -> Any:
        self.last.append(float(index))
        return torch.tensor(sum(self.last))


class Grows(Rows):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 2 + 3 * self.epoch

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(float(100 * self.epoch + index))


class Caches(Rows):
    def __init__(self) -> None:
        self.cache: dict[int, Any] = {}

    def __getitem__(self, index: int) -> Any:
        if index not in self.cache:
            self.cache[index] = super().__getitem__(index)
        return self.cache[index]


class ByEpoch(Sampler[int]):
    """Shuffles by an epoch that it is told, or counts itself."""

    def __init__(self, counts: bool) -> None:
        self.epoch, self.counts = 0, counts
        if not counts:
            self.set_epoch = functools.partial(setattr, self, "epoch")

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(self.epoch))
        self.epoch += self.counts
        return iter(order.tolist())


class InPlace(Sampler[int]):
    """Shuffles a list in place, by a generator of its own."""

    def __init__(self, own: Any) -> None:
        self.own, self.order = own, list(range(SIZE))

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        self.own.shuffle(self.order)
        return iter(list(self.order))


class Files(IterableDataset[Any]):
    """Shuffles its files in place, as those do that read shards; shares them out to workers."""

    def __init__(self, names: list[Any]) -> None:
        self.names, self.generator = names, random.Random(2)

    def __iter__(self) -> Iterator[Any]:
        self.generator.shuffle(self.names)
        worker = get_worker_info()
        names = self.names[worker.id :: worker.num_workers] if worker else self.names
        yield from (torch.tensor(float(len(str(name)))) for name in names)


class AtOnce(Rows):
    """Samples that are fetched at once it mixes, as a transform of batches does."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [torch.tensor(float(index + sum(indices) / 100)) for index in indices]


class CountsTogether(Rows):
    """Counts what all its workers have fetched."""

    def __init__(self) -> None:
        self.fetched = multiprocessing.Value("i", 0)

    def __getitem__(self, index: int) -> Any:
        with self.fetched.get_lock():
            self.fetched.value += 1
            return super().__getitem__(index) + self.fetched.value / 100


class Seeks(Rows):
    """Finds each sample in an open file."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115 - it stays open
        self.file.write(bytes(range(SIZE)))

    def __getitem__(self, index: int) -> Any:
        self.file.seek(index)
        return torch.tensor(float(ord(self.file.read(1))))


class ReadsOn(IterableDataset[Any]):
    """In each epoch the next lines of a file, or of what reads from one.

    :param lines: what reads from the open file.
    """

    def __init__(self, lines: Callable[[Any], Any]) -> None:
        self.file = tempfile.TemporaryFile("w+")  # noqa: SIM115 - it stays open
        self.file.writelines(f"{number}\n" for number in range(100))
        self.file.seek(0)
        self.lines = lines(self.file)

    def __iter__(self) -> Iterator[Any]:
        for _ in range(SIZE):
            yield torch.tensor(float("".join(next(self.lines))))


class ByRow(ReadsOn):
    """Reads line by line, by which a file still knows where it is."""

    def __init__(self) -> None:
        super().__init__(lambda file: None)

    def __iter__(self) -> Iterator[Any]:
        for _ in range(SIZE):
            yield torch.tensor(float(self.file.readline()))


def selected(file: Any) -> Any:
    """The lines of a file, from a database."""
    base = sqlite3.connect(":memory:")
    base.execute("create table rows (line text)")
    base.executemany("insert into rows values (?)", [(line,) for line in file])
    return base.execute("select line from rows order by rowid")


class WithIterator(IterableDataset[Any]):
    """Goes on where it stood, by an iterator that nothing can keep."""

    def __init__(self) -> None:
        self.numbers = (float(n * n) for n in itertools.count())

    def __iter__(self) -> Iterator[Any]:
        return iter([torch.tensor(next(self.numbers)) for _ in range(SIZE)])


class WithCycle(Rows):
    """Adds what comes next of a few numbers that it goes round."""

    def __init__(self, inner: Callable[[Any], Any]) -> None:
        self.noise = inner(itertools.cycle([0.25, 0.5, 0.125, 0.75]))

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) + next(self.noise)


class DrawsLate(Draws):
    """Draws for one sample alone."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) if index == 4 else Rows.__getitem__(self, index)


class GrowsByItself(Rows):
    size = SIZE

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        if index == 4:
            self.size = SIZE + 1
        return super().__getitem__(index)


class Longer(IterableDataset[Any]):
    """Says that it is shorter than it is."""

    def __len__(self) -> int:
        return BATCH

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.arange(float(SIZE)))


NUMPY, TORCH, NUMBER = np.random.default_rng(3), torch.Generator().manual_seed(3), 0
LAST: deque[float] = deque(maxlen=2)


class DrawsOfModule(Rows):
    """Augments by generators of this module, in functions that it calls."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) + self.augment() + torch.rand((), generator=TORCH)

    @staticmethod
    def augment() -> float:
        return shifted()


def shifted(by: Any = np.random.default_rng(4)) -> float:  # noqa: B008 - which people write
    return float(NUMPY.random() + by.random())


class CountsInModule(Rows):
    per_class = 0

    def __getitem__(self, index: int) -> Any:
        global NUMBER
        NUMBER += 1
        CountsInModule.per_class += 2
        LAST.append(NUMBER + CountsInModule.per_class / 10)
        return super().__getitem__(index) + sum(LAST)


def mixed(samples: list[Any]) -> Any:
    order = torch.randperm(len(samples), generator=TORCH)
    return torch.stack(samples) + torch.stack(samples)[order] / 10


def fresh(dataset: Dataset[Any], **options: Any) -> Any:
    """As a process has it that has just imported this module."""
    global NUMPY, NUMBER
    NUMPY, NUMBER, CountsInModule.per_class = np.random.default_rng(3), 0, 0
    shifted.__defaults__ = (np.random.default_rng(4),)
    TORCH.manual_seed(3)
    LAST.clear()
    return DataLoader(dataset, BATCH, **options)


def files(as_tuples: bool = False) -> Files:
    return Files([("x" * n,) if as_tuples else "x" * n for n in range(SIZE)])


def g() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def collate_with(generator: np.random.Generator) -> Callable[[list[Any]], Any]:
    return lambda samples: torch.stack(samples) + generator.random()


def shift(number: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.offset = 0.5 + number  # type: ignore[attr-defined]
