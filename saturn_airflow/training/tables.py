"""Data of known length whose samples are fetched by index."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader

from saturn_airflow.model.errors import JobError
from saturn_airflow.model.jobs import Job
from saturn_airflow.training import layout as layouts
from saturn_airflow.training import pinned_batches, rng
from saturn_airflow.training.batches import Cut, Data, GlobalBatch, KeepsNothing, Position, identity
from saturn_airflow.training.data_state import DataState
from saturn_airflow.training.given_order import GivenOrder, generator_of
from saturn_airflow.training.layout import Layout, MicroBatch
from saturn_airflow.training.loaders import aside, collates_each_alone, fetching, shuffles
from saturn_airflow.training.nested import map_parts
from saturn_airflow.training.seeded_samples import Keys, SeededSamples, WorkerInit, order
from saturn_airflow.training.without_group import without_group

Numbers = npt.NDArray[np.int64]


class Table(KeepsNothing):
    """Data of known length whose samples are fetched by index. What its methods do, :class:`Data` says.

    Each rank fetches only its own samples, unless they are collated by a function of the job's own: what that
    makes of a sample, such as masks or padding, may depend on the others, so it always gets the whole batch.
    """

    is_sure_of_length = True

    def __init__(self, loader: DataLoader[Any], job: Job, name: str, in_order: bool) -> None:
        self.loader = loader
        self._samples = SeededSamples(loader.dataset, job.hparams.seed)
        self._aside = SeededSamples(aside(loader), job.hparams.seed)
        self._by_sample = collates_each_alone(loader.collate_fn)
        self._batch_dim = job.batch_dim
        self._seed = job.hparams.seed
        self._shuffled = shuffles(loader.sampler) and not in_order
        self._given = GivenOrder(loader) if self._shuffled and generator_of(loader) else None
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
        self.extent = self.batches_per_epoch, size

    def batches(self, start: Position, cut: Cut, limit: int | None = None) -> Iterator[GlobalBatch]:
        loader = DataLoader(
            self._samples,
            batch_sampler=Keys(self._keys(start, cut, limit)),
            worker_init_fn=WorkerInit(self.loader.worker_init_fn),
            **fetching(self.loader),
        )
        # Workers are forked here, and see what is seen here.
        with without_group():
            iterator = iter(loader)

        def fetched() -> Any:
            pinned_batches.wait()
            with without_group():
                return next(iterator)

        for position in self._positions(start, limit):
            samples = len(self._batches[position.batch])
            whole = functools.partial(self._uncut, position)
            if self._by_sample:
                micro_batches = [MicroBatch(fetched(), len(rows)) for rows in cut.of(samples)]
            else:
                data = fetched()
                whole = functools.partial(identity, data)
                samples = self.layout.left_of(data, samples)
                micro_batches = [self.layout.take(data, samples, rows) for rows in cut.of(samples)]
            ends_epoch = position.batch == len(self._batches) - 1
            yield GlobalBatch(position, samples, micro_batches, ends_epoch, whole)

    @functools.cached_property
    def layout(self) -> Layout:
        collate = self.loader.collate_fn
        if self._batch_dim is None:
            with contextlib.suppress(Exception):  # what can't be collated with its like is looked at instead
                return layouts.of_collated(collate, self._aside[0, 0])
        return layouts.of_batch(self._uncut(Position()), self._batch_dim)

    def kept(self, position: Position) -> Any:
        return None if self._given is None else self._given.kept()

    def go_on(self, kept: Any) -> None:
        if kept is None:  # an earlier version shuffled by the job's seed
            self._given = None
        elif self._given is not None and isinstance(kept, str):  # what else there is, other data have kept
            self._given.go_on(kept)

    def known_by(self) -> str | None:
        numbers = hashlib.sha1()

        def note(path: tuple[Any, ...], part: Any) -> None:
            if isinstance(part, torch.Tensor | np.ndarray | bool | int | float):
                numbers.update(np.asarray(part).tobytes())

        try:
            for index in sorted({0, self._size // 2, self._size - 1}):
                map_parts(note, self._aside[0, index])
        except Exception:  # such as where only workers have opened its files, or of a sparse tensor
            return None
        return numbers.hexdigest()

    def watched(self) -> Callable[[], bool]:
        return DataState(self.loader).changed

    def first(self) -> MicroBatch:
        data = self._uncut(Position())
        return MicroBatch(data, self.layout.left_of(data, len(self._batches[0])))

    def _uncut(self, position: Position) -> Any:
        (keys,) = self._keys(position, Cut(), 1)
        with without_group():
            return self.loader.collate_fn(self._aside.__getitems__(keys))

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
        epoch, order = -1, np.empty(0, np.int64)  # of which a few are picked faster than of a tensor
        for position in self._positions(start, limit):
            if position.epoch != epoch:
                epoch = position.epoch
                order = self._order(epoch)
            batch = self._batches[position.batch]
            for rows in cut.of(len(batch)) if self._by_sample else [range(len(batch))]:
                chosen = [batch[row] for row in rows or [0]]
                yield [(epoch, index) for index in order[chosen].tolist()]

    def _order(self, epoch: int) -> Numbers:
        """The indices of all samples in ``epoch``.

        :raises JobError: where there are more or fewer than at first.
        """
        if (size := len(self.loader.dataset)) != self._size:  # type: ignore[arg-type]
            raise JobError(
                f"the dataset has {size} samples when epoch {epoch} begins, and had {self._size} at first: a "
                "job that is resumed would have others than one that was not stopped. Let a method "
                "set_epoch(epoch) of the dataset say how many it has, or leave them as they are"
            )
        if self._given is not None:
            return self._given.of(epoch)
        return order(self._size, self._seed, epoch).numpy() if self._shuffled else np.arange(self._size)


def _spread(end: int, count: int, generator: torch.Generator) -> list[int]:
    """``count`` of the first ``end`` numbers, or all where there are fewer, from all over and in any order.

    Data is often sorted, by length or by class, and the first samples are then all alike.
    """
    count = min(count, end)
    numbers = [(2 * i + 1) * end // (2 * count) for i in range(count)]
    return [numbers[i] for i in torch.randperm(count, generator=generator).tolist()]
