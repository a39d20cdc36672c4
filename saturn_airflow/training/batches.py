"""The batches of a job: the same ones in the same order, whatever shares they are cut into.

A global batch is cut into micro-batches (``HParams.accumulate``) and each of those into shares, one per
data-parallel rank. Where training stands in the data is an (epoch, batch) pair; the order of an epoch
follows from the job's seed and the epoch's number alone.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from saturn_airflow.launch import handed_over, job_log
from saturn_airflow.launch.users_code import of_the_job
from saturn_airflow.model import references
from saturn_airflow.model.errors import JobError
from saturn_airflow.model.jobs import HParams, Job
from saturn_airflow.model.references import Reference
from saturn_airflow.training import layout as layouts
from saturn_airflow.training import rng
from saturn_airflow.training.counters import Counters
from saturn_airflow.training.layout import Layout, MicroBatch
from saturn_airflow.training.loaders import any_sample, aside, collates_each_alone, is_table
from saturn_airflow.training.seeded_samples import Keys, SeededSamples


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


@dataclass(frozen=True)
class GlobalBatch:
    """This rank's part of one global batch of ``samples`` samples.

    :param whole: gives all of the batch, uncut.
    """

    position: Position
    samples: int
    micro_batches: list[MicroBatch]
    ends_epoch: bool
    whole: Callable[[], Any]


class Data(Protocol):
    """Batches of a job; ``batches_per_epoch`` is None where the data has no length."""

    batches_per_epoch: int | None

    @property
    def layout(self) -> Layout:
        """Where the samples of a batch lie."""
        ...

    def first(self) -> MicroBatch:
        """The first batch of the first epoch, whole."""
        ...

    def batches(self, start: Position, cut: Cut, limit: int | None = None) -> Iterator[GlobalBatch]:
        """Batches from ``start`` on, over as many epochs as it takes, at most ``limit`` of them."""
        ...

    def whole(self, share: int, shares: int, limit: int | None = None) -> Iterator[MicroBatch]:
        """Whole batches of the first epoch: of each ``shares`` in turn the one numbered ``share``.

        Every rank gets as many. One that would have one less gets a stand-in, of which no sample counts.

        :param limit: batches, of all ranks together, to stop after.
        """
        ...

    def kept(self, position: Position) -> Any:
        """What the data's own objects count, so that one can go on from ``position``; JSON-ready."""
        ...

    def go_on(self, kept: Any) -> None:
        """Continue with what :meth:`kept` told."""
        ...

    def few(self, sizes: Sequence[int]) -> Data:
        """The same data in as many batches as there are ``sizes``, of no more than so many samples.

        Where samples can be fetched by index they are taken from all over the data.
        """
        ...


def load(job: Job, reference: Reference, *, in_order: bool = False, here: bool = False) -> Data:
    """The data that ``reference`` (the job's ``load_dataloader`` or ``load_eval_dataloader``) loads.

    :param in_order: leave samples in the dataset's order even where the dataloader shuffles.
    :param here: let no workers fetch samples, where those by index can be fetched by anybody.
    :raises JobError: when what it returns is empty or can't be used.
    """
    rng.seed(job.hparams.seed, "data")
    name = str(reference)

    def make() -> Any:
        function = references.load(name)
        arguments = handed_over.arguments(job.data_args, "data_args")
        if job.hparams.batch_size is not None and _takes(function, "batch_size"):
            arguments.setdefault("batch_size", job.hparams.batch_size)
        with of_the_job(repr(name)), job_log.loading():
            return function(**arguments)

    loader = make()
    if isinstance(loader, DataLoader) and isinstance(loader.sampler, DistributedSampler):
        raise JobError(f"{name!r} uses a DistributedSampler; leave it out, Saturn shares the batches itself")
    if is_table(loader):
        if here:
            loader.num_workers, loader.prefetch_factor, loader.timeout = 0, None, 0
        return _Table(loader, job, name, in_order)
    if not isinstance(loader, Iterable):
        raise JobError(
            f"{name!r} returned a {type(loader).__name__}; return a DataLoader or an iterable of batches"
        )
    return _Stream(loader, make, job, name)


def total_steps(hparams: HParams, data: Data) -> int | None:
    """Optimizer steps of a whole job; None where its data has no length."""
    if hparams.batches is not None:
        return hparams.batches
    assert hparams.epochs is not None
    return hparams.epochs * data.batches_per_epoch if data.batches_per_epoch is not None else None


class _KeepsNothing:
    def kept(self, position: Position) -> Any:
        return None

    def go_on(self, kept: Any) -> None:
        pass


class _Table(_KeepsNothing):
    """Data of known length whose samples are fetched by index.

    Each rank fetches only its own samples, unless they are collated by a function of the job's own: what that
    makes of a sample, such as masks or padding, may depend on the others, so it always gets the whole batch.
    """

    def __init__(self, loader: DataLoader[Any], job: Job, name: str, in_order: bool) -> None:
        self._loader = loader
        self._samples = SeededSamples(loader.dataset, job.hparams.seed)
        self._aside = SeededSamples(aside(loader), job.hparams.seed)
        self._by_sample = collates_each_alone(loader.collate_fn)
        self._batch_dim = job.batch_dim
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
        self._end = end
        self._batches: list[Sequence[int]] = [
            range(end)[i : i + batch_size] for i in range(0, end, batch_size)
        ]
        self._size = size
        self.batches_per_epoch: int | None = len(self._batches)

    def batches(self, start: Position, cut: Cut, limit: int | None = None) -> Iterator[GlobalBatch]:
        fetched = iter(
            DataLoader(
                self._samples,
                batch_sampler=Keys(self._keys(start, cut, limit)),
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
            shares = cut.of(samples)
            whole = functools.partial(self._uncut, position)
            if self._by_sample:
                micro_batches = [MicroBatch(next(fetched), len(rows)) for rows in shares]
            else:
                data = next(fetched)
                whole = functools.partial(_itself, data)
                micro_batches = [self.layout.take(data, samples, rows) for rows in shares]
            ends_epoch = position.batch == len(self._batches) - 1
            yield GlobalBatch(position, samples, micro_batches, ends_epoch, whole)

    @functools.cached_property
    def layout(self) -> Layout:
        collate = self._loader.collate_fn
        if self._batch_dim is None:
            with contextlib.suppress(Exception):  # what can't be collated with its like is looked at instead
                return layouts.of_collated(collate, self._aside[0, 0])
        return layouts.of_batch(self.first().data, self._batch_dim)

    def first(self) -> MicroBatch:
        return MicroBatch(self._uncut(Position()), len(self._batches[0]))

    def _uncut(self, position: Position) -> Any:
        (keys,) = self._keys(position, Cut(), 1)
        return self._loader.collate_fn(self._aside.__getitems__(keys))

    def whole(self, share: int, shares: int, limit: int | None = None) -> Iterator[MicroBatch]:
        count = len(self._batches) if limit is None else min(limit, len(self._batches))
        own = copy.copy(self)
        own._batches = self._batches[share:count:shares]
        for batch in own.batches(Position(), Cut(), len(own._batches)):
            yield batch.micro_batches[0]
        if len(own._batches) < -(-count // shares):
            yield MicroBatch(self.first().data, 0)

    def few(self, sizes: Sequence[int]) -> Data:
        other = copy.copy(self)
        sizes = [min(size, len(self._batches[0])) for size in sizes]
        starts = itertools.accumulate(sizes, initial=0)
        picked = _spread(self._end, sum(sizes), rng.generator(self._seed, "few"))
        # Where there are not enough samples for all of them, each batch begins with the first one.
        other._batches = [
            picked[start : start + size] if start + size <= len(picked) else picked[:size]
            for start, size in zip(starts, sizes, strict=False)
        ]
        other.batches_per_epoch = len(other._batches)
        return other

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
            for rows in cut.of(len(batch)) if self._by_sample else [range(len(batch))]:
                chosen = [batch[row] for row in rows or [0]]
                yield [(epoch, index) for index in order[chosen].tolist()]

    def _order(self, epoch: int) -> torch.Tensor:
        if not self._shuffled:
            return torch.arange(self._size)
        return torch.randperm(self._size, generator=rng.generator(self._seed, "order", epoch))


class _Stream:
    """Data that can only be run through: every rank sees all of it and takes its shares."""

    def __init__(self, loader: Iterable[Any], make: Any, job: Job, name: str) -> None:
        self._loader: Iterable[Any] | None = loader
        self._make = make
        self._batch_dim = job.batch_dim
        self._layout: Layout | None = None
        self._begun: list[GlobalBatch] = []
        self._counters = Counters(loader)
        self._at_begin: tuple[int, Any] = (-1, None)
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
        self._begun = []
        return itertools.islice(self._endless(start, cut), limit)

    def beginning(self, count: int) -> list[GlobalBatch]:
        """The first batches, whole; kept until one goes through them, for starting workers takes long."""
        if len(self._begun) < count:
            with self._counters.put_back():
                self._begun = list(itertools.islice(self._endless(Position(), Cut()), count))
        begun = self._begun[:count]
        try:
            return copy.deepcopy(begun)  # a model may change its inputs
        except Exception:
            self._begun = []
            return begun

    def whole(self, share: int, shares: int, limit: int | None = None) -> Iterator[MicroBatch]:
        return _dealt(self.batches(Position(), Cut(), limit), share, shares)

    def kept(self, position: Position) -> Any:
        epoch, counted = self._at_begin
        return counted if epoch == position.epoch else self._counters.values()

    def go_on(self, kept: Any) -> None:
        self._counters.set(kept)

    @property
    def layout(self) -> Layout:
        return self._layout or self._look(self.first().data)

    def first(self) -> MicroBatch:
        return self.beginning(1)[0].micro_batches[0]

    def _look(self, data: Any) -> Layout:
        """The layout, found out by the first batch that is seen."""
        if self._layout is None:
            if self._batch_dim is None and isinstance(self._loader, DataLoader):
                with contextlib.suppress(Exception):  # it may have no samples, or none that can be seen alone
                    self._layout = layouts.of_collated(self._loader.collate_fn, any_sample(self._loader))
            self._layout = self._layout or layouts.of_batch(data, self._batch_dim)
        return self._layout

    def few(self, sizes: Sequence[int]) -> Data:
        return _Few(self, sizes)

    def _endless(self, start: Position, cut: Cut) -> Iterator[GlobalBatch]:
        for epoch in itertools.count(start.epoch):
            empty = True
            for position, data, ends_epoch in self._epoch(epoch):
                empty = False
                layout = self._look(data)
                if position >= start:
                    samples = layout.count(data)
                    micro_batches = [layout.take(data, samples, rows) for rows in cut.of(samples)]
                    whole = functools.partial(_itself, data)
                    yield GlobalBatch(position, samples, micro_batches, ends_epoch, whole)
            if empty:
                raise JobError(f"{self._name!r}: the data is empty; a job needs at least one batch")

    def _epoch(self, epoch: int) -> Iterator[tuple[Position, Any, bool]]:
        rng.seed(self._seed, "order", epoch)
        loader = self._loader if self._loader is not None else self._make()
        if isinstance(loader, DataLoader) and loader.generator is not None:
            loader.generator.manual_seed(rng.generator(self._seed, "order", epoch).initial_seed())
        if self._loader is not None:
            self._at_begin = epoch, self._counters.values()
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


class _Few(_KeepsNothing):
    """The first samples of each of the first batches of a stream."""

    def __init__(self, data: _Stream, sizes: Sequence[int]) -> None:
        self._data = data
        self._sizes = sizes
        self.batches_per_epoch: int | None = len(sizes)

    @property
    def layout(self) -> Layout:
        return self._data.layout

    def first(self) -> MicroBatch:
        return next(self.batches(Position(), Cut())).micro_batches[0]

    def few(self, sizes: Sequence[int]) -> Data:
        return _Few(self._data, sizes)

    def batches(self, start: Position, cut: Cut, limit: int | None = None) -> Iterator[GlobalBatch]:
        whole = self._data.beginning(len(self._sizes))
        chosen = zip(self._sizes, whole, strict=True)
        for size, batch in itertools.islice(
            chosen, start.batch, None if limit is None else start.batch + limit
        ):
            ((data, samples),) = batch.micro_batches
            take = self._data.layout.take
            data, count = take(data, samples, range(min(size, samples)))
            micro_batches = [take(data, count, rows) for rows in cut.of(count)]
            few = functools.partial(_itself, data)
            yield GlobalBatch(batch.position, count, micro_batches, batch.ends_epoch, few)

    def whole(self, share: int, shares: int, limit: int | None = None) -> Iterator[MicroBatch]:
        return _dealt(self.batches(Position(), Cut(), limit), share, shares)


def _dealt(batches: Iterator[GlobalBatch], share: int, shares: int) -> Iterator[MicroBatch]:
    """Of each ``shares`` whole batches of one epoch the one numbered ``share``; see :meth:`Data.whole`."""
    own: MicroBatch | None = None
    for number, batch in enumerate(batches):
        (micro_batch,) = batch.micro_batches
        if own is None or number % shares == share:
            own = micro_batch if number % shares == share else MicroBatch(micro_batch.data, 0)
        if number % shares == shares - 1 or batch.ends_epoch:
            yield own
            own = None
        if batch.ends_epoch:
            return
    if own is not None:
        yield own


def _spread(end: int, count: int, generator: torch.Generator) -> list[int]:
    """``count`` of the first ``end`` numbers, or all where there are fewer, from all over and in any order.

    Data is often sorted, by length or by class, and the first samples are then all alike.
    """
    count = min(count, end)
    numbers = [(2 * i + 1) * end // (2 * count) for i in range(count)]
    return [numbers[i] for i in torch.randperm(count, generator=generator).tolist()]


def _itself(data: Any) -> Any:
    return data


def _takes(function: Any, name: str) -> bool:
    parameters: Mapping[str, inspect.Parameter] = inspect.signature(function).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def split(rows: range, parts: int) -> list[range]:
    """``rows`` in ``parts`` pieces as ``torch.tensor_split`` cuts them."""
    size, larger = divmod(len(rows), parts)
    edges = [part * size + min(part, larger) for part in range(parts + 1)]
    return [rows[edges[part] : edges[part + 1]] for part in range(parts)]
