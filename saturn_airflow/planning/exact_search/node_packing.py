"""One node, exactly: can these jobs all end by C on G devices?

A branch and bound on waste. Devices that are free from f_d on and jobs of least area a_k leave
W = sum of C - f_d - sum of a_k device-seconds to waste; whatever a partial schedule wastes, by devices that
wait or by modes that are not the thriftiest, is gone for good. Near the optimum W is small, and few branches
survive.

Jobs are placed in order of start (every left-shifted schedule has such an order), so devices that are free
before the last start can never be used earlier than it: they waste until then. A branch ends when

- more is wasted than W, counting for each job left the least area among the modes that still end by C, and
  what is left of devices that are free too late for any job;
- the devices can't even share the jobs left regardless of time (:mod:`device_patterns`);
- it was refuted before: the same jobs left, with devices free at the same times.

Jobs that start together are placed in one order only. What was refuted is remembered by a hash of 128 bits
in a table of fixed size, so a search that was cut short soon is again where it was.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from saturn_airflow.planning.clock import Clock
from saturn_airflow.planning.compiled import compiled
from saturn_airflow.planning.exact_search.device_patterns import MOST_DEVICES, MOST_JOBS, REFUTED, share
from saturn_airflow.planning.instances.arrays import Floats, Ints, Modes, Words, modes_of
from saturn_airflow.planning.instances.instance import Instance

ClassRow = list[tuple[int, int]]
"""(class, mode) in order of start."""

#: Relative: sums of seconds are not exact.
_ROUNDING = 1e-11
FOUND, NONE, CUT_SHORT = 1, 0, -1
#: Branches between two looks at the clock: some milliseconds.
_BRANCHES_AT_ONCE = 20_000
#: Steps of :func:`share` for the jobs of a whole node, and for those left in one branch (at least so many
#: jobs).
_ROOT_EFFORT = 100_000
_SHARING = 300
_FEW_TO_SHARE = 5
#: The table of what was refuted: so many entries, of which a hash may have any of four. It is 32 MiB, which
#: the system hands out as the table fills.
_REMEMBERED = 1 << 21
_BUCKET = 4


class NotSettledError(Exception):
    """The search was cut short: neither a packing nor a proof that there is none."""


class Sharer:
    """The devices of a node (or of several, as if of one), each of which has from when it is free until C.

    Says quickly which sets of jobs they can't share: see :mod:`device_patterns`.

    :param free: (devices,) when they become free, ascending; a job that wants g of them begins when the g-th
        is free at the earliest.
    :param modes: what every class takes on them.
    :param end: C.
    """

    def __init__(self, free: Floats, modes: Modes, end: float) -> None:
        self.devices = len(free)
        self.free = free
        self.end = end
        #: (devices,) seconds that each has, ascending.
        self.capacities: Floats = np.maximum(0.0, end - free)[::-1].copy()
        self.capacity = math.fsum(self.capacities)
        self.modes = modes
        #: Least area of a job of each class that ends by C; infinite where none does.
        self.areas: Floats = modes.areas(end, free)
        #: Classes in the order in which devices are filled: those that may take longest first.
        longest = np.where(np.isfinite(modes.seconds), modes.seconds, 0).max(axis=1)
        self.order: Ints = np.argsort(-longest, kind="stable")

    def allowances(self, sets: Ints) -> Floats:
        """(sets,) device-seconds that a packing of each set of jobs may waste; below 0 there is none.

        :param sets: (sets, classes) how many jobs of each class.
        """
        areas = np.where(np.isfinite(self.areas), self.areas, 0.0)
        spare = np.asarray(self.capacity * (1 + _ROUNDING) - sets @ areas, dtype=np.float64)
        spare[(sets[:, ~np.isfinite(self.areas)] > 0).any(axis=1)] = -np.inf
        return spare

    def shareable(self, sets: Ints) -> npt.NDArray[np.bool_]:
        """Whether the devices might share each set of jobs by C; where not, there is no packing.

        :param sets: (sets, classes) how many jobs of each class.
        """
        allowances = self.allowances(sets)
        if self.devices > MOST_DEVICES:
            return allowances >= 0
        devices, seconds, _ = self.modes
        return _shareable(self.capacities, devices, seconds, self.areas, self.order, sets, allowances)


class Packer(Sharer):
    """Packs nodes of one type within a makespan C, and remembers for all of them what it refuted.

    :param kind: the type's index in the instance.
    :param end: C.
    """

    def __init__(self, instance: Instance, kind: int, end: float) -> None:
        super().__init__(np.array(instance.types[kind].free), modes_of(instance, kind), end)
        self.area: list[float] = self.areas.tolist()
        self._refuted: Words = np.zeros((_REMEMBERED, 2), dtype=np.uint64)
        self._keys = hash_keys(len(self.area))

    def search(self, jobs: tuple[int, ...], effort: int, clock: Clock | None = None) -> ClassRow | None:
        """A packing of ``jobs`` by C, or None when there is none.

        :param jobs: the class of each.
        :raises NotSettledError: after ``effort`` branches, or when the time is up.
        """
        allowance = self.capacity * (1 + _ROUNDING) - math.fsum([self.area[k] for k in jobs])
        if not allowance >= 0:  # Also where a job can't end by C: its area is infinite.
            return None
        kinds = np.array([k for k in self.order if k in jobs], dtype=np.int64)
        counts = np.array([jobs.count(k) for k in kinds], dtype=np.int64)
        path = np.zeros((2, len(jobs)), dtype=np.int64)
        spent, at_once = 0, min(effort, _BRANCHES_AT_ONCE)
        while True:
            status, branches = search(
                self.free,
                self.end,
                *self.modes,
                self.areas,
                kinds,
                counts.copy(),  # Cut short, it comes back without the jobs that were placed.
                len(kinds),
                allowance,
                at_once,
                _SHARING,
                self._keys,
                self._refuted,
                path,
            )
            if status == FOUND:
                return [(int(k), int(mode)) for k, mode in path.T]
            if status == NONE:
                return None
            spent += branches
            if spent >= effort or (clock is not None and clock.expired):
                raise NotSettledError
            # The table holds what was refuted so far; were it too small, more at once gets further.
            at_once = min(effort - spent, max(at_once, spent // 20))


def hash_keys(classes: int) -> Words:
    """(classes, 2) fixed random numbers: a set of jobs is hashed as the sum of those of its jobs.

    Zobrist's hashing ("A new hashing method with application for game playing", 1970) has XOR for the sum, by
    which two jobs of one class would cancel.
    """
    rng = np.random.default_rng(classes)
    return rng.integers(1, sys.maxsize, size=(classes, 2), dtype=np.uint64)


@compiled
def _shareable(
    capacities: Floats,
    devices: Ints,
    seconds: Floats,
    areas: Floats,
    order: Ints,
    sets: Ints,
    allowances: Floats,
) -> npt.NDArray[np.bool_]:
    """(sets,) whether a node might share each of the sets, its jobs taken in this order of classes."""
    could = allowances >= 0
    jobs = np.zeros(MOST_JOBS, np.int64)
    # A plain number would have the function compiled once more, for just this number.
    effort: Any = np.int64(_ROOT_EFFORT)
    for at in range(len(sets)):
        if could[at]:
            count = _listed(sets[at], order, jobs)
            if count <= MOST_JOBS:
                answer = share(capacities, devices, seconds, areas, jobs, count, allowances[at], effort)
                could[at] = answer != REFUTED
    return could


@compiled
def _listed(counts: Ints, order: Ints, jobs: Ints) -> int:
    """Write each job's class into ``jobs``, in this order of classes, as far as there is room.

    :returns: how many jobs there are.
    """
    count = 0
    for k in order:
        for _ in range(counts[k]):
            if count < len(jobs):
                jobs[count] = k
            count += 1
    return count


@compiled
def search(
    available: Floats,
    end: float,
    devices: Ints,
    seconds: Floats,
    releases: Floats,
    areas: Floats,
    kinds: Ints,
    counts: Ints,
    present: int,
    allowance: float,
    effort: int,
    sharing: int,
    keys: Words,
    refuted: Words,
    path: Ints,
) -> tuple[int, int]:
    """The branch and bound.

    :param available: (devices,) when devices become free, ascending.
    :param kinds: the ``present`` classes there are jobs of.
    :param counts: how many of each.
    :param allowance: device-seconds that may be wasted (W).
    :param effort: branches after which to stop.
    :param sharing: steps to spend in each branch on whether devices can share the jobs left; 0 for not
        asking.
    :param keys: (classes, 2), see :func:`hash_keys`.
    :param refuted: (a power of two, 2) hashes of what was refuted before; those of what is refuted now are
        added.
    :param path: (2, jobs) is filled with the class and mode of each job in order of start, when found.
    :returns: the status (FOUND, NONE, CUT_SHORT) and the number of branches.

    A depth-first search without recursion: at depth n, n jobs are placed, and row n of each array holds what
    is true there. A candidate is one number, ``position in kinds * most + mode``; so is what ``path`` holds
    meanwhile.
    """
    width, most = len(available), devices.shape[1]
    jobs = 0
    for k in range(present):
        jobs += counts[k]
    # By depth: when devices are free (ascending), what may still be wasted, when the job placed last started
    # and which candidate it was.
    free = np.zeros((jobs + 1, width))
    left = np.zeros(jobs + 1)
    started = np.zeros(jobs + 1)
    last = np.zeros(jobs + 1, np.int64)
    last[0] = -1
    hashes = np.zeros((jobs + 1, 2), np.uint64)
    # The candidates at each depth, in the order in which they are tried: what each wastes, its area, its
    # start and its number; how many there are, and how many were tried.
    waste, area, start = (
        np.zeros((jobs + 1, present * most)),
        np.zeros((jobs + 1, present * most)),
        np.zeros((jobs + 1, present * most)),
    )
    choice = np.zeros((jobs + 1, present * most), np.int64)
    found, tried = np.zeros(jobs + 1, np.int64), np.zeros(jobs + 1, np.int64)
    # Two views of one value, to hash the bits of a float.
    number = np.zeros(1)
    bits = number.view(np.uint64)
    capacities = np.zeros(width)
    waiting = np.zeros(jobs, np.int64)
    mask = refuted.shape[0] - 1
    left[0] = allowance
    for device in range(width):
        # A device that is free after C has no time at all, rather than less than none.
        free[0, device] = min(available[device], end)
    depth, branches, entering = 0, 0, True
    while True:
        here = free[depth]
        if entering:
            entering = False
            branches += 1
            if branches > effort:
                return CUT_SHORT, branches
            if depth == jobs:
                for at in range(jobs):
                    key = path[0, at]
                    path[0, at], path[1, at] = kinds[key // most], key % most
                return FOUND, branches
            # What may be wasted, once every job left takes at least the least area of its modes that still
            # end by C from here, and once the devices that are free too late for the shortest of them are
            # written off.
            found[depth] = tried[depth] = 0
            spare = left[depth]
            shortest = np.inf
            for k in range(present):
                if counts[k] > 0:
                    least = np.inf
                    for m in range(most):
                        takes = seconds[kinds[k], m]
                        if devices[kinds[k], m] > width:
                            continue
                        begin = max(here[devices[kinds[k], m] - 1], releases[kinds[k]])
                        if begin + takes <= end:
                            least = min(least, devices[kinds[k], m] * takes)
                            shortest = min(shortest, takes)
                    spare -= counts[k] * (least - areas[kinds[k]])
                    if spare < 0:
                        break
            device = width - 1
            while spare >= 0 and device >= 0 and end - here[device] < shortest:
                spare -= end - here[device]
                device -= 1
            settled = spare < 0
            if not settled:
                # The jobs left, the devices' times, and the last of the jobs that start together here, which
                # rules out candidates. What may be wasted follows from the first two. Classes are hashed, not
                # positions in ``kinds``: searches for other sets of jobs use the same table.
                first, second = np.uint64(7), np.uint64(11)
                for k in range(present):
                    first += np.uint64(counts[k]) * keys[kinds[k], 0]
                    second += np.uint64(counts[k]) * keys[kinds[k], 1]
                for device in range(width):
                    number[0] = here[device]
                    first, second = _mixed(first, bits[0]), _mixed(second + np.uint64(1), bits[0])
                if here[0] <= started[depth] and last[depth] >= 0:
                    which = np.uint64(kinds[last[depth] // most] * most + last[depth] % most + 1)
                    first, second = _mixed(first, which), _mixed(second, which)
                # Never 0, by which a vacant entry is known.
                hashes[depth, 0], hashes[depth, 1] = first, second | np.uint64(1)
                slot = int(first & np.uint64(mask))
                for at in range(_BUCKET):
                    if refuted[slot ^ at, 0] == first and refuted[slot ^ at, 1] == hashes[depth, 1]:
                        settled = True
                        break
            if settled:
                depth -= 1
                if depth < 0:
                    return NONE, branches
                counts[path[0, depth] // most] += 1
                continue
            remaining = jobs - depth
            if sharing > 0 and _FEW_TO_SHARE <= remaining <= MOST_JOBS and width <= MOST_DEVICES:
                at = 0
                for k in range(present):
                    for _ in range(counts[k]):
                        waiting[at] = kinds[k]
                        at += 1
                for device in range(width):
                    capacities[device] = end - here[width - 1 - device]
                settled = (
                    share(capacities, devices, seconds, areas, waiting, at, left[depth], sharing) == REFUTED
                )
            if not settled:
                for k in range(present):
                    if counts[k] == 0:
                        continue
                    for m in range(most):
                        wanted, takes = devices[kinds[k], m], seconds[kinds[k], m]
                        if wanted > width:
                            continue
                        begin = max(here[wanted - 1], releases[kinds[k]])
                        if begin + takes > end:
                            continue
                        size = wanted * takes
                        wastes = size - areas[kinds[k]]
                        # Devices that are free before it starts can run nothing before it any more (jobs are
                        # placed in order of start), so they wait until then. Where it starts at once,
                        # together with the job before it, only one order of the two is tried.
                        if begin > here[0]:
                            for device in range(width):
                                if here[device] >= begin:
                                    break
                                wastes += begin - here[device]
                        elif begin <= started[depth] and k * most + m < last[depth]:
                            continue
                        if wastes > left[depth]:
                            continue
                        # Insert it in order of waste; of equal waste, the largest area first.
                        at = found[depth]
                        while at > 0 and (
                            waste[depth, at - 1] > wastes
                            or (waste[depth, at - 1] == wastes and area[depth, at - 1] < size)
                        ):
                            waste[depth, at], area[depth, at] = waste[depth, at - 1], area[depth, at - 1]
                            start[depth, at], choice[depth, at] = start[depth, at - 1], choice[depth, at - 1]
                            at -= 1
                        waste[depth, at], area[depth, at] = wastes, size
                        start[depth, at], choice[depth, at] = begin, k * most + m
                        found[depth] += 1
        # All candidates failed: remember that, in place of an arbitrary one of four where none is vacant.
        if tried[depth] == found[depth]:
            slot = int(hashes[depth, 0] & np.uint64(mask))
            into = slot ^ (branches % _BUCKET)
            for at in range(_BUCKET):
                if refuted[slot ^ at, 1] == 0:
                    into = slot ^ at
                    break
            refuted[into, 0], refuted[into, 1] = hashes[depth, 0], hashes[depth, 1]
            depth -= 1
            if depth < 0:
                return NONE, branches
            counts[path[0, depth] // most] += 1
            continue
        at = tried[depth]
        tried[depth] += 1
        key, begin = choice[depth, at], start[depth, at]
        wanted = devices[kinds[key // most], key % most]
        # The devices' times after it: those of the devices it does not take (none earlier than its start)
        # merged with its end, which keeps them ascending.
        then, ends = free[depth + 1], begin + seconds[kinds[key // most], key % most]
        into = 0
        device = wanted
        while device < width and max(here[device], begin) <= ends:
            then[into] = max(here[device], begin)
            into += 1
            device += 1
        for _ in range(wanted):
            then[into] = ends
            into += 1
        while device < width:
            then[into] = here[device]
            into += 1
            device += 1
        counts[key // most] -= 1
        path[0, depth] = key
        left[depth + 1] = left[depth] - waste[depth, at]
        started[depth + 1], last[depth + 1] = begin, key
        depth, entering = depth + 1, True


@compiled
def _mixed(value: Any, more: Any) -> Any:
    """``more`` hashed into ``value``: 64 bits.

    The factor is 2^64 over the golden ratio, which spreads neighbouring values (Knuth, The Art of Computer
    Programming, vol. 3, 6.4); the shift brings its high bits down to those that choose the slot.
    """
    value = (value ^ more) * np.uint64(0x9E3779B97F4A7C15)
    return value ^ (value >> np.uint64(29))
