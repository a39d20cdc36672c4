"""Noticing that ranks are about to exchange different things, before they do.

Collective operations match by their order alone: where one rank gathers a block while another gathers the
next one, they hang or hand each other the wrong weights. So each rank notes what it is about to exchange in
memory that all of them see (they are on one machine), and looks whether the others noted the same.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch.distributed as dist

from saturn_airflow.launch.request import DoesNotFit
from saturn_airflow.training.ranks import Ranks

# Exchanges that each rank's notes have room for: far more than one rank can be ahead of another.
_SLOTS = 4096
#: What a rank notes that is done with a pass: others may wait for it in an exchange of theirs.
NOTHING_MORE = "nothing more"
# More names than any model has; a note is the number of the exchange times this, plus its name's code.
_CODES = 2**20


class Agreement:
    """The order of what the ranks exchange; every rank must make it together.

    :param fixes: what can be exchanged, the same on every rank, and what the user can do where the ranks
        don't agree on it.
    """

    def __init__(self, fixes: Mapping[str, str], ranks: Ranks) -> None:
        self._fixes = fixes
        self._names = [*fixes, NOTHING_MORE]
        self._codes = {name: code for code, name in enumerate(self._names)}
        self._ranks = ranks
        self._count = 0
        self._notes = _shared_notes(ranks)

    def note(self, name: str) -> None:
        """Note that this rank exchanges ``name`` next.

        :raises DoesNotFit: when another rank exchanges something else.
        """
        # Number and name are one word of memory, so that nobody reads half a note. A note of another number
        # is that of a rank that is behind or ahead, with which this exchange is compared when it gets there.
        self._count += 1
        own = self._notes[self._ranks.rank]
        own[self._count % _SLOTS] = self._count * _CODES + self._codes[name]
        # Two ranks may have looked at the same moment, before either saw the other: so also at the last one.
        for count in (self._count, self._count - 1):
            self._compare(count)

    def _compare(self, count: int) -> None:
        notes = self._notes[:, count % _SLOTS].tolist()
        own = notes[self._ranks.rank]
        for rank, note in enumerate(notes):
            if note != own and note // _CODES == count:
                here, there = self._names[own % _CODES], self._names[note % _CODES]
                raise DoesNotFit(
                    f"device {self._ranks.rank} computes {here} while device {rank} computes {there}: what "
                    "this model computes depends on its data or on chance; "
                    f"{self._fixes.get(here) or self._fixes[there]}"
                )


def _shared_notes(ranks: Ranks) -> np.ndarray:
    """Memory that all ranks share, a row each, full of zeros."""
    shape, path = (ranks.size, _SLOTS), [""]
    if dist.get_backend() == "fake":  # one process plays all ranks
        return np.zeros(shape, dtype=np.int64)
    if ranks.is_first:
        folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        descriptor, path[0] = tempfile.mkstemp(prefix="saturn-order-", dir=folder)
        os.close(descriptor)
        np.memmap(path[0], dtype=np.int64, mode="w+", shape=shape).flush()
    if ranks.size > 1:
        dist.broadcast_object_list(path)
    notes = np.memmap(path[0], dtype=np.int64, mode="r+", shape=shape)
    ranks.barrier()
    if ranks.is_first:
        Path(path[0]).unlink()
    return notes
