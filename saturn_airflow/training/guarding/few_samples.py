"""How many samples the guard's steps are taken on, and which of them are met again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from saturn_airflow.training.batches import Cut, Data, GlobalBatch
from saturn_airflow.training.layout import MicroBatch
from saturn_airflow.training.nested import copied

# The number of the batch that comes again, and of the one in whose place it does.
_FIRST, _AGAIN = 0, 2


def numbers_of_samples(devices: int, accumulate: int) -> tuple[int, int]:
    """Of batches that each device has some of, not all as much, and of those that one has nothing of."""
    return max(2 * devices - 1, accumulate + 1, 3), max(1, devices - 1)


def met_again(batches: Mapping[int, GlobalBatch], cut: Cut, data: Data) -> dict[int, GlobalBatch]:
    """``batches`` of ``data`` by their numbers; in the place of the third one the first comes once more.

    A loss may remember samples, as temporal ensembling does: it then meets some, and those that one rank has
    seen come to another.
    """
    if not {_FIRST, _AGAIN} <= batches.keys():
        return dict(batches)
    again = _elsewhere(batches[_FIRST], cut, data)
    # Steps of a job's own look at the batch's number.
    return {**batches, _AGAIN: dataclasses.replace(again, position=batches[_AGAIN].position)}


def _elsewhere(batch: GlobalBatch, cut: Cut, data: Data) -> GlobalBatch:
    """A copy of a batch, with the shares in the other order."""
    parts = batch.micro_batches
    if cut.shares > 1:
        other = dataclasses.replace(cut, share=cut.shares - 1 - cut.share)
        whole = batch.whole()
        parts = [data.layout.take(whole, batch.samples, rows) for rows in other.of(batch.samples)]
    copies = [MicroBatch(copied(part.data), part.samples) for part in parts]
    return dataclasses.replace(batch, micro_batches=copies, turned=cut.shares > 1)
