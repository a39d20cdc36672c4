"""Fixed-makespan packing: fit all jobs on the nodes by C, with those that don't fit yet in a pool.

Every node always holds a set of jobs that :mod:`node_packing` has packed by C. A move exchanges up to two
jobs between a node and the pool, or between two nodes, and counts only when the sets it makes can be packed.
Measured in nodes' capacities, the energy is

    least areas in the pool - L sum over nodes of min(slack, 1/10)^2,

so that between equals the slack gathers in few nodes, where then one more job fits. Moves are taken by
simulated annealing at one low temperature; the cheap energy is judged before the costly packing. The pool
and its ejections are the idea of Nagata and Bräysy, "A powerful route minimization heuristic for the
vehicle routing problem with time windows" (2009).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from saturn_airflow.planning.clock import Clock
from saturn_airflow.planning.instance import Instance
from saturn_airflow.planning.node_packing import ClassRow, Packer
from saturn_airflow.planning.schedule import Placed, Schedule, times

_TEMPERATURE = 0.002
_GATHERING = 3.0
_ENOUGH_SLACK = 0.1
_FIRST_EFFORT = 1000


class PoolSearch:
    """The search for a schedule that ends by C, which may be changed on the way.

    :param schedule: where to start; nodes that end too late lose jobs to the pool.
    :param effort: branches to spend on packing a set of jobs when it first comes up.
    """

    def __init__(
        self, instance: Instance, schedule: Schedule, end: float, rng: random.Random, effort: int
    ) -> None:
        self.effort = effort
        self.instance = instance
        self.rng = rng
        self.rows: list[ClassRow] = [
            [(instance.class_of[job], mode) for job, mode in row] for row in schedule
        ]
        self.pool: list[int] = []
        self.aim(end)
        for node, row in enumerate(schedule):
            if any(run.end > end for run in times(instance, node, row)):
                self._unload(node)

    def aim(self, end: float) -> None:
        """Set C. Raising it keeps all that is packed."""
        self.end = end
        packers = [Packer(self.instance, kind, end) for kind in range(len(self.instance.types))]
        self.packers = [packers[kind] for kind in self.instance.type_of]
        self.sets = [tuple(sorted(k for k, _ in row)) for row in self.rows]
        #: What a job counts for in the pool: its least area on any node, over the largest node's capacity.
        whole = max(packer.capacity for packer in packers)
        areas = [min(packer.area[k] for packer in packers) for k in range(len(self.instance.classes))]
        self.value = [area / whole for area in areas]
        self.slack = [self._slack(node, jobs) for node, jobs in enumerate(self.sets)]

    def run(self, clock: Clock) -> Schedule | None:
        """Search until the pool is empty (the schedule then ends by C) or the time is up (None)."""
        if not all(math.isfinite(value) for value in self.value):
            return None
        steps = 0
        while self.pool:
            steps += 1
            if not steps & 15 and clock.expired:
                return None
            if len(self.rows) == 1 or self.rng.random() < 0.5:
                self._exchange_with_pool(self.rng.randrange(len(self.rows)))
            else:
                self._exchange(*self.rng.sample(range(len(self.rows)), 2))
        return self.schedule()

    def schedule(self) -> Schedule:
        """The rows, with classes turned back into jobs."""
        waiting = [list(group.jobs) for group in self.instance.classes]
        return [[Placed(waiting[k].pop(), mode) for k, mode in row] for row in self.rows]

    def _slack(self, node: int, jobs: Sequence[int]) -> float:
        packer = self.packers[node]
        return 1 - sum([packer.area[k] for k in jobs]) / packer.capacity

    def _unload(self, node: int) -> None:
        jobs = list(self.sets[node])
        while (row := self.packers[node].pack(tuple(jobs), _FIRST_EFFORT)) is None:
            self.pool.append(jobs.pop(self.rng.randrange(len(jobs))))
        self._settle(node, tuple(jobs), row, self._slack(node, jobs))

    def _settle(self, node: int, jobs: tuple[int, ...], row: ClassRow, slack: float) -> None:
        self.sets[node], self.rows[node], self.slack[node] = jobs, list(row), slack

    def _worth(self, change: float) -> bool:
        """Whether to take a move that changes the energy by ``change``."""
        return change <= 0 or self.rng.random() < math.exp(-change / _TEMPERATURE)

    def _exchange_with_pool(self, node: int) -> None:
        jobs, rng = self.sets[node], self.rng
        out_count = rng.randrange(3)
        in_count = 1 if rng.random() < 0.7 else 2
        if out_count > len(jobs) or in_count > len(self.pool):
            return
        out, into = rng.sample(jobs, out_count), rng.sample(self.pool, in_count)
        packer = self.packers[node]
        area = packer.area
        slack = (
            self.slack[node] + (sum([area[k] for k in out]) - sum([area[k] for k in into])) / packer.capacity
        )
        if not slack > 0 or sorted(out) == sorted(into):
            return
        change = sum([self.value[k] for k in out]) - sum([self.value[k] for k in into])
        change += _gathered(self.slack[node]) - _gathered(slack)
        if not self._worth(change):
            return
        wanted = _exchanged(jobs, out, into)
        row = packer.pack(wanted, self.effort)
        if row is None:
            return
        self._settle(node, wanted, row, slack)
        for k in into:
            self.pool.remove(k)
        self.pool += out

    def _exchange(self, one: int, two: int) -> None:
        rng = self.rng
        first, second = self.sets[one], self.sets[two]
        out_count, in_count = rng.randrange(3), rng.randrange(3)
        if out_count > len(first) or in_count > len(second) or out_count + in_count == 0:
            return
        out, into = rng.sample(first, out_count), rng.sample(second, in_count)
        if sorted(out) == sorted(into):
            return
        slacks = []
        for node, lost, won in ((one, out, into), (two, into, out)):
            packer = self.packers[node]
            change = sum([packer.area[k] for k in lost]) - sum([packer.area[k] for k in won])
            slacks.append(self.slack[node] + change / packer.capacity)
        if not (slacks[0] > 0 and slacks[1] > 0):
            return
        change = _gathered(self.slack[one]) + _gathered(self.slack[two])
        if not self._worth(change - _gathered(slacks[0]) - _gathered(slacks[1])):
            return
        wanted = [
            (slacks[0], one, _exchanged(first, out, into)),
            (slacks[1], two, _exchanged(second, into, out)),
        ]
        found = []
        for slack, node, jobs in sorted(wanted):
            row = self.packers[node].pack(jobs, self.effort)
            if row is None:
                return
            found.append((node, jobs, row, slack))
        for node, jobs, row, slack in found:
            self._settle(node, jobs, row, slack)


def _gathered(slack: float) -> float:
    return _GATHERING * min(slack, _ENOUGH_SLACK) ** 2


def _exchanged(jobs: tuple[int, ...], out: Sequence[int], into: Sequence[int]) -> tuple[int, ...]:
    kept = list(jobs)
    for k in out:
        kept.remove(k)
    return tuple(sorted([*kept, *into]))
