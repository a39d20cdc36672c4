"""What the search with an ejection pool works on, as arrays for compiled code."""

from __future__ import annotations

from typing import NamedTuple

from saturn_airflow.planning.instances.arrays import Floats, Ints, Words


class Tables(NamedTuple):
    """The instance.

    :param devices: (types, classes, most modes) of each mode.
    :param seconds: (types, classes, most modes) of each mode; infinite where there is none.
    :param ranks: (types, classes) in which order classes are packed: those that may take longest first.
    :param releases: (classes,) seconds.
    :param kinds: (nodes,) the type of each.
    :param widths: (nodes,) devices of each.
    :param free: (nodes, most devices) when devices become free, ascending.
    :param keys: (types, classes, 2) see :func:`hash_keys`.
    """

    devices: Ints
    seconds: Floats
    ranks: Ints
    releases: Floats
    kinds: Ints
    widths: Ints
    free: Floats
    keys: Words


class Target(NamedTuple):
    """What depends on C.

    :param end: C.
    :param areas: (types, classes) least device-seconds of a job that ends in time; infinite where none does.
    :param capacities: (nodes,) device-seconds until C.
    :param shares: (nodes,) the same over the largest of them.
    :param values: (classes,) what a job in the pool adds to the energy: its least area over the largest
        capacity.
    """

    end: float
    areas: Floats
    capacities: Floats
    shares: Floats
    values: Floats


class PoolState(NamedTuple):
    """Every node's jobs and the pool's.

    :param classes: (nodes, jobs) the class of each job, in order of start.
    :param modes: (nodes, jobs) its mode.
    :param lengths: (nodes,) how many jobs there are.
    :param slacks: (nodes,) what the jobs leave of the capacity, as a share of it.
    :param pool: (jobs,) the class of each job in the pool.
    :param pooled: (1,) how many there are.
    """

    classes: Ints
    modes: Ints
    lengths: Ints
    slacks: Floats
    pool: Ints
    pooled: Ints


class Memory(NamedTuple):
    """Sets that could not be packed.

    :param sets: (a power of two, 2) hashes; a later set of the same slot takes its place.
    :param spent: (a power of two, 2) branches spent on it (or _REFUTED), and how often it came up since.
    :param branches: the table of :func:`node_packing.search`.
    """

    sets: Words
    spent: Ints
    branches: Words
