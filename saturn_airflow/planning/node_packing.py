"""One node, exactly: can these jobs all end by C on G devices?

A branch and bound on waste. The jobs' least areas leave W = G C - sum of least areas device-seconds to
waste; whatever a partial schedule wastes, by devices that wait or by modes that are not the thriftiest,
is gone for good. Near the optimum W is small, and hardly any branch survives: 12 jobs on 8 devices take
milliseconds to settle.

Jobs are placed in order of start (every left-shifted schedule has such an order), so devices that are free
before the last start can never be used earlier than it: they waste until then. A branch ends when

- more is wasted than W, counting for each job left the least area among the modes that still end by C;
- the same jobs are left with devices free at the same times as in a branch already searched.

Jobs that start together are placed in one order only.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import NamedTuple

from saturn_airflow.planning.clock import Clock
from saturn_airflow.planning.instance import Instance

ClassRow = list[tuple[int, int]]
"""(class, mode) in order of start."""

_ROUNDING = 1e-11


class Candidate(NamedTuple):
    """A mode that ends by C, of a job that starts at 0."""

    devices: int
    seconds: float
    mode: int


class NotSettledError(Exception):
    """The search was cut short: neither a packing nor a proof that there is none."""


class Packer:
    """Packs nodes of one type within a makespan C.

    :param end: C.
    """

    def __init__(self, instance: Instance, kind: int, end: float) -> None:
        self.devices = instance.types[kind].devices
        self.end = end
        self.capacity = self.devices * end
        self.releases = [group.release for group in instance.classes]
        self.modes = [
            [
                Candidate(mode.devices, mode.seconds, index)
                for index, mode in enumerate(group.modes[kind])
                if group.release + mode.seconds <= end
            ]
            for group in instance.classes
        ]
        #: Least area of a job of each class that ends by C; infinite where none does.
        self.area = [min((m.devices * m.seconds for m in modes), default=math.inf) for modes in self.modes]
        self._known: dict[tuple[int, ...], tuple[ClassRow | None, int, int]] = {}

    def pack(self, jobs: tuple[int, ...], effort: int) -> ClassRow | None:
        """A packing found within ``effort`` branches, or None. Remembers, and tries harder when asked often.

        :param jobs: a class for each job, ascending.
        """
        row, spent, asked = self._known.get(jobs, (None, 0, 0))
        if row is not None or spent < 0:
            return row
        if spent:
            if asked < _ASKED_AGAIN:
                self._known[jobs] = (None, spent, asked + 1)
                return None
            effort = spent * 4
        try:
            row = self.search(jobs, effort)
        except NotSettledError:
            self._known[jobs] = (None, effort, 0)
            return None
        self._known[jobs] = (row, -1, 0)
        return row

    def search(self, jobs: tuple[int, ...], effort: int, clock: Clock | None = None) -> ClassRow | None:
        """A packing of ``jobs`` by C, or None when there is none.

        :raises NotSettledError: after ``effort`` branches, or when the time is up.
        """
        kinds = sorted(set(jobs))
        allowance = self.capacity * (1 + _ROUNDING) - sum([self.area[k] for k in jobs])
        if allowance < 0:
            return None
        modes = [self.modes[k] for k in kinds]
        areas = [self.area[k] for k in kinds]
        releases = [self.releases[k] for k in kinds]
        released = not any(releases)
        end = self.end
        positions = range(len(kinds))
        seen: set[tuple[tuple[int, ...], tuple[float, ...], tuple[int, int]]] = set()
        path: ClassRow = []
        branches = 0

        def place(
            free: list[float], counts: tuple[int, ...], left: float, last_start: float, last: tuple[int, int]
        ) -> bool:
            nonlocal branches
            branches += 1
            if branches > effort or (clock is not None and not branches & 1023 and clock.expired):
                raise NotSettledError
            first = free[0]
            extra = 0.0
            usable = []
            for k in positions:
                if counts[k]:
                    least = math.inf
                    fitting = []
                    for candidate in modes[k]:
                        devices, seconds, _ = candidate
                        start = free[devices - 1]
                        if not released and start < releases[k]:
                            start = releases[k]
                        if start + seconds <= end:
                            fitting.append((candidate, start))
                            area = devices * seconds
                            if area < least:
                                least = area
                    if not fitting:
                        return False
                    extra += counts[k] * (least - areas[k])
                    if extra > left:
                        return False
                    usable.append((k, fitting))
            if not usable:
                return True
            state = (counts, tuple(free), last if first <= last_start else _FIRST)
            if state in seen:
                return False
            seen.add(state)
            branching = []
            for k, fitting in usable:
                thriftiest = areas[k]
                for (devices, seconds, mode), start in fitting:
                    waste = devices * seconds - thriftiest
                    if start > first:
                        for at in free:
                            if at < start:
                                waste += start - at
                            else:
                                break
                    elif start <= last_start and (k, mode) < last:
                        continue
                    if waste <= left:
                        branching.append((waste, -devices * seconds, k, mode, devices, seconds, start))
            branching.sort()
            for waste, _, k, mode, devices, seconds, start in branching:
                if start > first:
                    then = [at if at > start else start for at in free]
                    del then[:devices]
                else:
                    then = free[devices:]
                ends = start + seconds
                at = bisect_right(then, ends)
                then[at:at] = [ends] * devices
                path.append((kinds[k], mode))
                fewer = (*counts[:k], counts[k] - 1, *counts[k + 1 :])
                if place(then, fewer, left - waste, start, (k, mode)):
                    return True
                path.pop()
            return False

        counts = tuple([jobs.count(k) for k in kinds])
        return path if place([0.0] * self.devices, counts, allowance, 0.0, _FIRST) else None


_ASKED_AGAIN = 8
_FIRST = (-1, -1)
