"""The batches of a job: the same ones in the same order, whatever shares they are cut into.

A global batch is cut into micro-batches (``HParams.accumulate``) and each of those into shares, one per
data-parallel rank. Where training stands in the data is an (epoch, batch) pair; the order of an epoch
follows from the job's seed and the epoch's number alone.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler, SequentialSampler

from saturn_airflow import references
from saturn_airflow.errors import JobError
from saturn_airflow.jobs import Job
from saturn_airflow.references import Reference
from saturn_airflow.training import rng
from saturn_airflow.training.precision import map_tensors
from saturn_airflow.training.users_code import of_the_job


class Position(NamedTuple):
    """The next batch to train on: ``epoch`` and ``batch`` within it, both from 0."""

    epoch: int = 0
    batch: int = 0


@dataclass(frozen=True)
class Cut:
    """How batches are cut: into ``accumulate`` micro-batches, of each this rank takes one of the shares."""

    accumulate: int = 1
    share: int = 0
    shares: int = 1

    def of(self, samples: int) -> list[range]:
        """This rank's samples of each micro-batch; an empty range where there are too few for every rank."""
        micro_batches = split(range(samples), min(self.accumulate, samples))
        return [split(micro_batch, self.shares)[self.share] for micro_batch in micro_batches]


class MicroBatch(NamedTuple):
    """One rank's share of a micro-batch.

    :param samples: how many samples of ``data`` count; 0 where ``data`` is a stand-in of one sample, there
        so that a rank without a share takes part in the collective operations.
    """

    data: Any
    samples: int


@dataclass(frozen=True)
class GlobalBatch:
    """This rank's part of one global batch of ``samples`` samples."""

    position: Position
    samples: int
    micro_batches: list[MicroBatch]
    ends_epoch: bool


class Data(Protocol):
    """Batches of a job; ``batches_per_epoch`` is None where the data has no length."""

    batches_per_epoch: int | None

    def batches(self, start: Position, cut: Cut, limit: int | None = None) -> Iterator[GlobalBatch]:
        """Batches from ``start`` on, over as many epochs as it takes, at most ``limit`` of them."""
        ...


def load(job: Job, reference: Reference, *, in_order: bool = False) -> Data:
    """The data that ``reference`` (the job's ``load_dataloader`` or ``load_eval_dataloader``) loads.

    :param in_order: leave samples in the dataset's order even where the dataloader shuffles.
    :raises JobError: when what it returns is empty or can't be used.
    """
    rng.seed(job.hparams.seed, "data")
    name = str(reference)

    def make() -> Any:
        function = references.load(name)
        arguments = dict(job.data_args)
        if job.hparams.batch_size is not None and _takes(function, "batch_size"):
            arguments.setdefault("batch_size", job.hparams.batch_size)
        with of_the_job(repr(name)):
            return function(**arguments)

    loader = make()
    if isinstance(loader, DataLoader) and isinstance(loader.sampler, DistributedSampler):
        raise JobError(f"{name!r} uses a DistributedSampler; leave it out, Saturn shares the batches itself")
    if _is_table(loader):
        return _Table(loader, job, name, in_order)
    if not isinstance(loader, Iterable):
        raise JobError(
            f"{name!r} returned a {type(loader).__name__}; return a DataLoader or an iterable of batches"
        )
    return _Stream(loader, make, job, name)


def sample_count(data: Any) -> int:
    """Samples in a collated batch: the length of its first tensor.

    :raises JobError: when it holds no tensor.
    """
    sizes: list[int] = []
    map_tensors(lambda tensor: sizes.append(len(tensor)) if tensor.ndim else None, data)
    if not sizes:
        raise JobError("a batch holds no tensor, so Saturn can't tell how many samples it has")
    return sizes[0]


class _Table:
    """Data of known length whose samples are fetched by index, each rank only its own."""

    def __init__(self, loader: DataLoader[Any], job: Job, name: str, in_order: bool) -> None:
        self._loader = loader
        self._seed = job.hparams.seed
        self._shuffled = isinstance(loader.sampler, RandomSampler) and not in_order
        size = len(loader.dataset)  # type: ignore[arg-type]
        batch_size = job.hparams.batch_size or loader.batch_size
        assert batch_size is not None
        end = size - size % batch_size if loader.drop_last else size
        if not end:
            if not size:
                raise JobError(f"{name!r}: the dataset is empty; a job needs at least one batch")
            raise JobError(
                f"{name!r}: {size} samples are fewer than one batch of {batch_size}, which drop_last drops; "
                "lower batch_size or set drop_last=False"
            )
        self._batches = [range(end)[i : i + batch_size] for i in range(0, end, batch_size)]
        self._size = size
        self.batches_per_epoch: int | None = len(self._batches)

    def batches(self, start: Position, cut: Cut, limit: int | None = None) -> Iterator[GlobalBatch]:
        fetched = iter(
            DataLoader(
                _SeededSamples(self._loader.dataset, self._seed),
                batch_sampler=_Keys(self._keys(start, cut, limit)),
                num_workers=self._loader.num_workers,
                collate_fn=self._loader.collate_fn,
                pin_memory=self._loader.pin_memory,
                timeout=self._loader.timeout,
                worker_init_fn=self._loader.worker_init_fn,
                multiprocessing_context=self._loader.multiprocessing_context,
                prefetch_factor=self._loader.prefetch_factor,
            )
        )
        for position in self._positions(start, limit):
            samples = len(self._batches[position.batch])
            micro_batches = [MicroBatch(next(fetched), len(rows)) for rows in cut.of(samples)]
            ends_epoch = position.batch == len(self._batches) - 1
            yield GlobalBatch(position, samples, micro_batches, ends_epoch)

    def _positions(self, start: Position, limit: int | None) -> Iterator[Position]:
        per_epoch = len(self._batches)
        first = start.epoch * per_epoch + start.batch
        numbers = itertools.count(first) if limit is None else range(first, first + limit)
        return (Position(*divmod(number, per_epoch)) for number in numbers)

    def _keys(self, start: Position, cut: Cut, limit: int | None) -> Iterator[list[tuple[int, int]]]:
        epoch, order = -1, torch.empty(0)
        for position in self._positions(start, limit):
            if position.epoch != epoch:
                epoch = position.epoch
                order = self._order(epoch)
            batch = self._batches[position.batch]
            for rows in cut.of(len(batch)):
                yield [(epoch, int(order[batch[row]])) for row in rows or [0]]

    def _order(self, epoch: int) -> torch.Tensor:
        if not self._shuffled:
            return torch.arange(self._size)
        return torch.randperm(self._size, generator=rng.generator(self._seed, "order", epoch))


class _Keys:
    """A batch sampler that is run through once."""

    def __init__(self, keys: Iterator[list[tuple[int, int]]]) -> None:
        self._keys = keys

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return self._keys


class _SeededSamples(Dataset[Any]):
    """A dataset whose random augmentations follow from (seed, epoch, index), not from who fetches when."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed

    def __getitem__(self, key: tuple[int, int]) -> Any:
        epoch, index = key
        rng.seed(self._seed, "sample", epoch, index)
        return self._dataset[index]


class _Stream:
    """Data that can only be run through: every rank sees all of it and takes its shares."""

    def __init__(self, loader: Iterable[Any], make: Any, job: Job, name: str) -> None:
        self._loader: Iterable[Any] | None = loader
        self._make = make
        self._seed = job.hparams.seed
        self._name = name
        try:
            length = len(loader)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            length = None
        if length == 0:
            raise JobError(f"{name!r}: the data is empty; a job needs at least one batch")
        self.batches_per_epoch: int | None = length

    def batches(self, start: Position, cut: Cut, limit: int | None = None) -> Iterator[GlobalBatch]:
        return itertools.islice(self._endless(start, cut), limit)

    def _endless(self, start: Position, cut: Cut) -> Iterator[GlobalBatch]:
        for epoch in itertools.count(start.epoch):
            empty = True
            for position, data, ends_epoch in self._epoch(epoch):
                empty = False
                if position >= start:
                    samples = sample_count(data)
                    micro_batches = [take(data, samples, rows) for rows in cut.of(samples)]
                    yield GlobalBatch(position, samples, micro_batches, ends_epoch)
            if empty:
                raise JobError(f"{self._name!r}: the data is empty; a job needs at least one batch")

    def _epoch(self, epoch: int) -> Iterator[tuple[Position, Any, bool]]:
        rng.seed(self._seed, "order", epoch)
        loader = self._loader if self._loader is not None else self._make()
        if isinstance(loader, DataLoader) and loader.generator is not None:
            loader.generator.manual_seed(rng.generator(self._seed, "order", epoch).initial_seed())
        source = iter(loader)
        # An iterator runs out once, so the next epoch needs a new one.
        self._loader = None if source is loader else loader
        nothing = object()
        upcoming = next(source, nothing)
        for number in itertools.count():
            if upcoming is nothing:
                return
            rng.seed(self._seed, "stream", epoch, number)
            data, upcoming = upcoming, next(source, nothing)
            yield Position(epoch, number), data, upcoming is nothing


def take(data: Any, samples: int, rows: range) -> MicroBatch:
    """The samples ``rows`` of a collated batch."""
    chosen = rows or range(1)

    def take(tensor: torch.Tensor) -> torch.Tensor:
        per_sample = tensor.ndim and len(tensor) == samples
        return tensor[chosen.start : chosen.stop] if per_sample else tensor

    return MicroBatch(map_tensors(take, data), len(rows))


def _is_table(loader: Any) -> bool:
    """Whether samples can be fetched by index in an order of our own choosing."""
    if not isinstance(loader, DataLoader) or loader.batch_size is None:
        return False
    if not hasattr(loader.dataset, "__getitem__") or not hasattr(loader.dataset, "__len__"):
        return False
    sampler = loader.sampler
    if isinstance(sampler, RandomSampler):
        return not sampler.replacement and sampler.num_samples == len(loader.dataset)
    return type(sampler) is SequentialSampler


def _takes(function: Any, name: str) -> bool:
    parameters: Mapping[str, inspect.Parameter] = inspect.signature(function).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def split(rows: range, parts: int) -> list[range]:
    """``rows`` in ``parts`` pieces as ``torch.tensor_split`` cuts them."""
    size, larger = divmod(len(rows), parts)
    edges = [part * size + min(part, larger) for part in range(parts + 1)]
    return [rows[edges[part] : edges[part + 1]] for part in range(parts)]
