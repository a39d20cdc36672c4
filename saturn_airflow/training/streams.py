"""Data that can only be run through, such as an IterableDataset or what a sampler of one's own chooses."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from saturn_airflow.model.errors import JobError
from saturn_airflow.model.jobs import Job
from saturn_airflow.training import layout as layouts
from saturn_airflow.training import pinned_batches, rng
from saturn_airflow.training.batches import Cut, Data, GlobalBatch, KeepsNothing, Position, identity
from saturn_airflow.training.data_state import DataState
from saturn_airflow.training.layout import Layout, MicroBatch
from saturn_airflow.training.loaders import alike, any_sample, changes_batches, set_epoch
from saturn_airflow.training.nested import map_parts
from saturn_airflow.training.without_group import without_group

_NOTHING = object()


class Stream:
    """Data that can only be run through: every rank sees all of it and takes its shares. See :class:`Data`.

    :param make: makes the loader anew, such as where one can be run through once.
    """

    is_sure_of_length = False

    def __init__(self, loader: Iterable[Any], make: Callable[[], Any], job: Job, name: str) -> None:
        #: As the job made it first, by whatever it draws.
        self.loader = loader
        self._loader: Iterable[Any] | None = loader
        self._make = make
        self._batch_dim = job.batch_dim
        self._layout: Layout | None = None
        self._looked = False
        self._begun: list[GlobalBatch] = []
        #: Whether it was seen to fill the tensors of a batch anew for the next one.
        self._refills = False
        self._state = DataState(loader)
        self._at_begin: tuple[int, Any] = (-1, None)
        #: What the loader's objects go on with, and whether the epochs before have to be run through as well.
        self._kept: Any = None
        self._from_the_start = False
        #: What of the loader's objects a checkpoint has set besides, by where it is, and what sets it again.
        self._set_besides: tuple[set[str], Callable[..., bool]] | None = None
        self._seed = job.hparams.seed
        self._name = name
        try:
            length = len(loader)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            length = None
        if length == 0:
            raise JobError(f"{name!r}: the data is empty; a job needs at least one batch")
        self.batches_per_epoch: int | None = length
        self.extent = length, None

    def batches(self, start: Position, cut: Cut, limit: int | None = None) -> Iterator[GlobalBatch]:
        self._begun = []
        return itertools.islice(self._endless(start, cut), limit)

    def beginning(self, count: int) -> list[GlobalBatch]:
        """The first batches, whole; kept until one goes through them, for starting workers takes long."""
        if len(self._begun) < count:
            self._begun = []
            with self.aside():
                for batch in itertools.islice(self._endless(Position(), Cut()), count):
                    self._begun.append(_by_itself(batch))
                    self._refills |= not _is_as(self._begun[-1].whole(), batch.whole())
        begun = self._begun[:count]
        try:
            return copy.deepcopy(begun)  # a model may change its inputs
        except Exception:
            self._begun = []
            return begun

    def whole(self, share: int, shares: int, limit: int | None = None) -> Iterator[MicroBatch]:
        with self.aside():
            yield from _dealt(self.batches(Position(), Cut(), limit), share, shares)

    def known_by(self) -> str | None:
        return None

    def watched(self) -> Callable[[], bool]:
        return DataState(self._loader).changed if self._loader is not None else lambda: False

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        before, back = self._state.summaries(), self._state.snapshot()
        yield
        now = self._state.summaries()
        if changed := {path for path in now if before.get(path) != now[path]}:
            self._set_besides = changed, self._state.snapshot()
            back(changed)

    def _set_what_data_leave(self, begun: Mapping[str, Any]) -> None:
        """Set again what a checkpoint has besides, of what the batches up to here have not changed."""
        if self._set_besides is not None:
            paths, put = self._set_besides
            now, self._set_besides = self._state.summaries(), None
            put({path for path in paths if now.get(path) == begun.get(path)})

    def kept(self, position: Position) -> Any:
        epoch, kept = self._at_begin
        return kept if epoch == position.epoch else self._values()

    def go_on(self, kept: Any) -> None:
        self._kept = None if isinstance(kept, str) else kept  # a text is what a Table has kept
        self._from_the_start = not self._state.set(self._kept)

    def _values(self) -> Any:
        """What the loader's objects keep by now; nothing where it is made anew for each epoch."""
        if self._loader is None:
            return None
        return [{}, None] if _has_lasting_workers(self._loader) else self._state.values()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """What is run through inside is run through again afterwards, as if for the first time."""
        besides, self._set_besides = self._set_besides, None
        try:
            with self._state.put_back() as is_back:
                yield
        finally:
            self._set_besides = besides
        if self._loader is None:
            return
        if _has_lasting_workers(self._loader):
            self._loader._iterator = None  # type: ignore[attr-defined]
        if not is_back():
            self._loader = self._make()
            self._state = DataState(self._loader)
            self.go_on(self._kept)

    @property
    def layout(self) -> Layout:
        return self._layout or self._look(self.first().data)

    def first(self) -> MicroBatch:
        return self.beginning(1)[0].micro_batches[0]

    def _look(self, data: Any) -> Layout:
        """The layout, found out by a sample or by the first batch that is seen."""
        self._layout = self._layout or layouts.of_batch(data, self._batch_dim)
        return self._layout

    def _look_at_a_sample(self) -> None:
        loader, self._looked = self._loader, True
        if self._batch_dim is None and isinstance(loader, DataLoader) and not changes_batches(loader):
            # It may have no samples, or none that can be seen alone.
            with self.aside(), contextlib.suppress(Exception):
                self._layout = layouts.of_collated(loader.collate_fn, any_sample(loader))

    def few(self, sizes: Sequence[int]) -> Data:
        return _Few(self, sizes)

    def _endless(self, start: Position, cut: Cut) -> Iterator[GlobalBatch]:
        if not self._looked:
            self._look_at_a_sample()
        begun = self._state.summaries() if self._set_besides is not None else {}
        for epoch in itertools.count(0 if self._from_the_start else start.epoch):
            empty, come_to = True, 0
            if start == Position(epoch, 0):
                self._set_what_data_leave(begun)
            for position, data, ends in self._epoch(epoch):
                empty, come_to = False, position.batch + 1
                layout = self._look(data)
                if position >= start:
                    samples = layout.count(data)
                    micro_batches = [layout.take(data, samples, rows) for rows in cut.of(samples)]
                    whole = functools.partial(identity, data)
                    yield GlobalBatch(position, samples, micro_batches, ends, whole)
                elif position == Position(start.epoch, start.batch - 1):
                    self._set_what_data_leave(begun)
            if empty:
                raise JobError(f"{self._name!r}: the data is empty; a job needs at least one batch")
            if epoch == start.epoch and come_to < start.batch:
                raise JobError(
                    f"{self._name!r}: the data have changed since this job was trained last: epoch {epoch} "
                    f"ends after batch {come_to}, and {start.batch} were trained; start the job from scratch"
                )

    def _epoch(self, epoch: int) -> Iterator[tuple[Position, Any, Callable[[], bool]]]:
        rng.seed(self._seed, "order", epoch)
        loader = self._loader if self._loader is not None else self._make()
        self._at_begin = epoch, self._values()
        set_epoch(loader, epoch)
        with without_group():
            source = iter(loader)
        # An iterator runs out once, so the next epoch needs a new one.
        self._loader = None if source is loader else loader

        upcoming = _Upcoming(functools.partial(self._fetch, source))
        for number in itertools.count():
            data = upcoming.take()
            if data is _NOTHING:
                return
            upcoming = _Upcoming(functools.partial(self._fetch, source, epoch, number))
            yield Position(epoch, number), data, upcoming.is_none

    def _fetch(self, source: Iterator[Any], *after: int) -> Any:
        """The next batch of a source, ``after`` that of this epoch and number."""
        if after:
            rng.seed(self._seed, "stream", *after)
        pinned_batches.wait()
        with without_group():
            data = next(source, _NOTHING)
        return _kept(data) if self._refills else data


class _Upcoming:
    """What comes after a batch. It is fetched when somebody asks for it, and not before: what the data count
    may be read by the model, as in a plain loop."""

    def __init__(self, fetch: Callable[[], Any]) -> None:
        self._fetch: Callable[[], Any] | None = fetch
        self._found: Any = None
        self._error: BaseException | None = None

    def is_none(self) -> bool:
        """Whether there is nothing more; what fetching it raised is raised by :meth:`take`."""
        if self._fetch is not None:
            try:
                self._found = self._fetch()
            except (Exception, SystemExit) as error:
                self._error = error
            self._fetch = None
        return self._found is _NOTHING

    def take(self) -> Any:
        self.is_none()
        if self._error is not None:
            raise self._error
        return self._found


class _Few(KeepsNothing):
    """The first samples of each of the first batches of a stream."""

    is_sure_of_length = True

    def __init__(self, data: Stream, sizes: Sequence[int]) -> None:
        self._data = data
        self._sizes = sizes
        self.batches_per_epoch: int | None = len(sizes)
        self.extent = len(sizes), None

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
            few = functools.partial(identity, data)
            yield GlobalBatch(batch.position, count, micro_batches, batch.ends_epoch, few)

    def whole(self, share: int, shares: int, limit: int | None = None) -> Iterator[MicroBatch]:
        return _dealt(self.batches(Position(), Cut(), limit), share, shares)


def _by_itself(batch: GlobalBatch) -> GlobalBatch:
    """A batch that does not follow what comes after it."""
    batch = dataclasses.replace(
        batch, micro_batches=[part._replace(data=_kept(part.data)) for part in batch.micro_batches]
    )
    return dataclasses.replace(
        batch, ends=batch.ends_epoch, whole=functools.partial(identity, batch.micro_batches[0].data)
    )


def _kept(data: Any) -> Any:
    """A batch with copies of its tensors and arrays."""

    def copied(path: tuple[Any, ...], part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return part.clone()
        return part.copy() if isinstance(part, np.ndarray) else part

    return map_parts(copied, data)


def _is_as(kept: Any, data: Any) -> bool:
    """Whether ``data`` is what it was; what can't be compared, such as nested tensors, is taken to be."""
    try:
        return alike(kept, data)
    except Exception:  # a tensor's subclass may raise anything
        return True


def _has_lasting_workers(loader: Any) -> bool:
    """Whether what its workers keep lasts from one epoch to the next, where nobody sees it."""
    return isinstance(loader, DataLoader) and loader.persistent_workers and loader.num_workers > 0


def _dealt(batches: Iterator[GlobalBatch], share: int, shares: int) -> Iterator[MicroBatch]:
    """Of each ``shares`` whole batches of one epoch the one numbered ``share``; see :meth:`Data.whole`."""
    own: MicroBatch | None = None
    for number, batch in enumerate(batches):
        (micro_batch,) = batch.micro_batches
        if own is None or number % shares == share:
            own = micro_batch if number % shares == share else MicroBatch(micro_batch.data, 0)
            own = own._replace(data=_kept(own.data)) if shares > 1 else own  # others are fetched before it
        if number % shares == shares - 1 or batch.ends_epoch:
            yield own
            own = None
        if batch.ends_epoch:
            return
    if own is not None:
        yield own
