"""An instance as arrays, which is what compiled code reads."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from saturn_airflow.planning.instances.instance import Instance

#: Arrays that compiled code takes; ``Words`` hold bits, such as hashes.
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]


class Modes(NamedTuple):
    """The modes of every class on nodes of one type, narrow and slow first.

    :param devices: (classes, most modes) devices of each mode.
    :param seconds: (classes, most modes) seconds of each mode; infinite where there is none.
    :param releases: (classes,) seconds before which no job of the class starts.
    """

    devices: Ints
    seconds: Floats
    releases: Floats

    def areas(self, end: float, free: Floats) -> Floats:
        """(classes,) the least device-seconds of a job that ends by ``end``; infinite where none does.

        :param free: (devices,) when devices become free, ascending.
        """
        in_time = np.maximum(self.releases[:, None], free[self.devices - 1]) + self.seconds <= end
        least: Floats = np.where(in_time, self.devices * self.seconds, np.inf).min(axis=1)
        return least


@lru_cache(maxsize=64)
def _modes(modes: tuple[tuple[tuple[int, float], ...], ...], releases: tuple[float, ...]) -> Modes:
    most = max(1, max(map(len, modes)))
    devices = np.ones((len(modes), most), dtype=np.int64)
    seconds = np.full((len(modes), most), np.inf)
    for k, own in enumerate(modes):
        for m, (wanted, takes) in enumerate(own):
            devices[k, m], seconds[k, m] = wanted, takes
    return Modes(devices, seconds, np.array(releases, dtype=float))


def modes_of(instance: Instance, kind: int) -> Modes:
    """The modes of every class on nodes of type ``kind``."""
    modes = tuple([tuple([(m.devices, m.seconds) for m in group.modes[kind]]) for group in instance.classes])
    return _modes(modes, tuple([group.release for group in instance.classes]))


def merged(tables: Sequence[Modes]) -> Modes:
    """By class and width, the least seconds on any of these types of node.

    :returns: as many columns as the tables have together; what another column of the same width beats is
        infinite.
    """
    devices = np.concatenate([table.devices for table in tables], axis=1)
    seconds = np.concatenate([table.seconds for table in tables], axis=1)
    for k in range(len(devices)):
        for width in np.unique(devices[k]):
            same = np.flatnonzero(devices[k] == width)
            least = seconds[k, same].min()
            seconds[k, same] = np.inf
            seconds[k, same[0]] = least
    return Modes(devices, seconds, tables[0].releases)


def free_by_node(instance: Instance) -> Floats:
    """(nodes, most devices) when the devices of each node become free, ascending; beyond them infinite."""
    found = np.full((len(instance.type_of), max(kind.devices for kind in instance.types)), np.inf)
    for node, kind in enumerate(instance.type_of):
        found[node, : instance.types[kind].devices] = instance.types[kind].free
    return found
