"""The batches of a job: the same ones in the same order, whatever shares they are cut into.

A global batch is cut into micro-batches (``HParams.accumulate``) and each of those into shares, one per
data-parallel rank. Where training stands in the data is an (epoch, batch) pair; the order of an epoch
follows from the job's seed and the epoch's number alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from saturn_airflow.model.jobs import HParams
from saturn_airflow.training.layout import Layout, MicroBatch


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

    def of(self, samples: int) -> Sequence[range]:
        """This rank's samples of each micro-batch; an empty range where there are too few for every rank."""
        return _cut(self, samples)


@functools.lru_cache
def _cut(cut: Cut, samples: int) -> Sequence[range]:
    micro_batches = split(range(samples), min(cut.accumulate, samples))
    return tuple(split(micro_batch, cut.shares)[cut.share] for micro_batch in micro_batches)


@dataclass(frozen=True)
class GlobalBatch:
    """This rank's part of one global batch of ``samples`` samples.

    :param ends: whether it is the last of its epoch, or what finds that out.
    :param whole: gives all of the batch, uncut.
    :param turned: whether the last rank has the first share, and so on.
    """

    position: Position
    samples: int
    micro_batches: list[MicroBatch]
    ends: bool | Callable[[], bool]
    whole: Callable[[], Any]
    turned: bool = False

    @property
    def ends_epoch(self) -> bool:
        """Whether it is the last of its epoch; of a stream the next batch is fetched to see that."""
        return self.ends() if callable(self.ends) else self.ends


class Data(Protocol):
    """Batches of a job.

    :ivar batches_per_epoch: None where the data has no length.
    :ivar extent: batches of an epoch and samples, where they are known: others tell that the data are others.
    :ivar is_sure_of_length: whether they are as many; an iterable may say another number than it gives.
    """

    batches_per_epoch: int | None
    is_sure_of_length: bool

    @property
    def extent(self) -> tuple[int | None, int | None]: ...

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

    def aside(self) -> AbstractContextManager[None]:
        """Around looks at batches, after which the data's own objects count as if nobody had looked."""
        ...

    def known_by(self) -> str | None:
        """A text by which a few of the samples are known; None where they can't be had without the others."""
        ...

    def watched(self) -> Callable[[], bool]:
        """What tells later whether the data's own objects are others by then."""
        ...

    def reading(self) -> AbstractContextManager[None]:
        """Around the reading of a checkpoint, which has global variables that the data's code may name, too.

        Those that the data change themselves are as :meth:`go_on` and the batches before have them, rather.
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


def total_steps(hparams: HParams, data: Data) -> int | None:
    """Optimizer steps of a whole job; None where its data has no length."""
    if hparams.batches is not None:
        return hparams.batches
    assert hparams.epochs is not None
    return hparams.epochs * data.batches_per_epoch if data.batches_per_epoch is not None else None


class KeepsNothing:
    """The :class:`Data` that follow from where training stands alone: what their own objects keep is
    nothing."""

    def aside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def reading(self) -> AbstractContextManager[None]:
        return nullcontext()

    def known_by(self) -> str | None:
        return None

    def watched(self) -> Callable[[], bool]:
        return lambda: False

    def kept(self, position: Position) -> Any:
        return None

    def go_on(self, kept: Any) -> None:
        pass


def identity(data: Any) -> Any:
    """``data``: what a stage does that has nothing to do."""
    return data


def split(rows: range, parts: int) -> list[range]:
    """``rows`` in ``parts`` pieces as ``torch.tensor_split`` cuts them."""
    size, larger = divmod(len(rows), parts)
    edges = [part * size + min(part, larger) for part in range(parts + 1)]
    return [rows[edges[part] : edges[part + 1]] for part in range(parts)]
