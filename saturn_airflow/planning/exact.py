"""Small problems, exactly: every way to share the jobs out over the nodes that area allows.

For a makespan C, nodes are filled one after another with sets of jobs. The least areas of all jobs leave
W device-seconds to waste in all; a node that takes so little that the rest would need more than the other
nodes have is never tried, and near the optimum few sets remain. Each is packed, or refuted, by
:mod:`node_packing`. Equal nodes take their sets in descending order, so that no sharing is tried twice.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator

from saturn_airflow.planning.clock import Clock
from saturn_airflow.planning.instance import Instance
from saturn_airflow.planning.node_packing import ClassRow, NotSettledError, Packer
from saturn_airflow.planning.schedule import Placed, Schedule

Counts = tuple[int, ...]
_MOST_SHARINGS = 1 << 14
_MOST_NODES = 4


def is_small(instance: Instance) -> bool:
    """Whether it is worth trying."""
    sharings = math.prod(len(group.jobs) + 1 for group in instance.classes)
    return len(instance.problem.nodes) <= _MOST_NODES and sharings <= _MOST_SHARINGS


def schedule_by(instance: Instance, end: float, clock: Clock) -> Schedule | None:
    """A schedule that ends by ``end``, or None when there is none.

    :raises NotSettledError: when the time is up.
    """
    return _Sharing(instance, end, clock).search()


class _Sharing:
    def __init__(self, instance: Instance, end: float, clock: Clock) -> None:
        self.instance = instance
        self.clock = clock
        self.packers = [Packer(instance, kind, end) for kind in range(len(instance.types))]
        # Nodes in order of type, so that equal nodes follow each other.
        self.nodes = sorted(range(len(instance.type_of)), key=lambda node: instance.type_of[node])
        self.kinds = [instance.type_of[node] for node in self.nodes]
        self.known: dict[tuple[int, Counts], ClassRow | None] = {}
        self.hopeless: set[tuple[int, Counts, Counts | None]] = set()
        classes = range(len(instance.classes))
        #: Least area of each class on the nodes from the n-th on, and what those nodes have.
        self.later_area = [
            [min((self.packers[kind].area[k] for kind in self.kinds[at:]), default=math.inf) for k in classes]
            for at in range(len(self.nodes) + 1)
        ]
        self.later_capacity = [
            math.fsum(self.packers[kind].capacity for kind in self.kinds[at:])
            for at in range(len(self.nodes) + 1)
        ]

    def search(self) -> Schedule | None:
        everything = tuple(len(group.jobs) for group in self.instance.classes)
        rows = self._fill(0, everything, None)
        if rows is None:
            return None
        waiting = [list(group.jobs) for group in self.instance.classes]
        schedule: Schedule = [[] for _ in self.nodes]
        for node, row in zip(self.nodes, rows, strict=True):
            schedule[node] = [Placed(waiting[k].pop(), mode) for k, mode in row]
        return schedule

    def _fill(self, at: int, left: Counts, before: Counts | None) -> list[ClassRow] | None:
        """Rows for the nodes from the ``at``-th on, for the jobs ``left``.

        :param before: what the equal node before this one took; None when there is none.
        """
        if at == len(self.nodes):
            return [] if not any(left) else None
        state = (at, left, before)
        if state in self.hopeless:
            return None
        for taken in self._sets(at, left, before):
            row = self._packed(self.kinds[at], taken)
            if row is None:
                continue
            rest = tuple([n - t for n, t in zip(left, taken, strict=True)])
            equal = at + 1 < len(self.nodes) and self.kinds[at + 1] == self.kinds[at]
            rows = self._fill(at + 1, rest, taken if equal else None)
            if rows is not None:
                return [row, *rows]
        self.hopeless.add(state)
        return None

    def _packed(self, kind: int, taken: Counts) -> ClassRow | None:
        key = (kind, taken)
        if key not in self.known:
            jobs = tuple([k for k, n in enumerate(taken) for _ in range(n)])
            self.known[key] = self.packers[kind].search(jobs, sys.maxsize, self.clock)
        return self.known[key]

    def _sets(self, at: int, left: Counts, before: Counts | None) -> Iterator[Counts]:
        """Sets for the ``at``-th node that leave the later ones what they can hold, full ones first."""
        area = self.packers[self.kinds[at]].area
        later = self.later_area[at + 1]
        room = self.packers[self.kinds[at]].capacity * (1 + 1e-11)
        later_room = self.later_capacity[at + 1] * (1 + 1e-11)
        classes = len(left)

        def choose(
            k: int, used: float, given: float, taken: tuple[int, ...], tied: bool
        ) -> Iterator[tuple[float, Counts]]:
            if used > room or given > later_room:
                return
            if self.clock.expired:
                raise NotSettledError
            if k == classes:
                yield used, taken
                return
            most = min(left[k], before[k]) if tied and before is not None else left[k]
            for count in range(most, -1, -1):
                remaining = left[k] - count
                if (count and not math.isfinite(area[k])) or (remaining and not math.isfinite(later[k])):
                    continue
                yield from choose(
                    k + 1,
                    used + (count * area[k] if count else 0.0),
                    given + (remaining * later[k] if remaining else 0.0),
                    (*taken, count),
                    tied and before is not None and count == before[k],
                )

        found = sorted(choose(0, 0.0, 0.0, (), before is not None), reverse=True)
        for _, taken in found:
            yield taken
