"""The search for better plans: which neighbourhood when, in one process.

Where a node runs few jobs, packing sets of jobs to a target makespan (:mod:`pool_search`) finds far better
plans than moving jobs around; where it runs many, or there is but one node, orders are searched
(:mod:`annealing`). Both start from the best schedule known, whoever found it.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from saturn_airflow.planning.annealing import (
    anneal,
    completion_energy,
    device_time_energy,
    makespan_energy,
)
from saturn_airflow.planning.clock import Clock
from saturn_airflow.planning.incumbent import Incumbent
from saturn_airflow.planning.objectives import DEVICE_TIME, MEAN_COMPLETION
from saturn_airflow.planning.pool_search import PoolSearch

_FEW_JOBS = 9
_SLICE = 0.5
_FIRST_STEP = 0.01
_LEAST_STEP = 0.0002


class Searcher:
    """Improves an incumbent, a slice of time at a time.

    :param exchange: called between slices, to tell other processes and hear from them.
    """

    def __init__(self, best: Incumbent, seed: int, exchange: Callable[[], None] = lambda: None) -> None:
        self.best = best
        self.rng = random.Random(seed)
        self.exchange = exchange
        self.jobs = len(best.instance.problem.jobs)
        self.nodes = len(best.instance.problem.nodes)
        self.heat = 1.0
        self.pool: PoolSearch | None = None
        self.seen = -1
        self.patience = 0.0

    def run(self, clock: Clock) -> None:
        """Search until the plan is good enough or either clock is up."""
        turn = 0
        packs = self.best.objective.name not in (MEAN_COMPLETION, DEVICE_TIME) and self.nodes > 1
        few = self.jobs <= _FEW_JOBS * self.nodes
        while not (self.best.done or clock.expired):
            turn += 1
            if packs and (turn % 8 if few else not turn % 4):
                self._pack(clock.within(min(self.best.clock.left, _SLICE)))
            else:
                self._anneal(
                    clock.within(min(self.best.clock.left, _SLICE * (3 if not few or self.nodes == 1 else 1)))
                )
            self.exchange()

    def _anneal(self, clock: Clock) -> None:
        best, instance = self.best, self.best.instance
        hot, cold = 0.3, 0.003
        whole: Callable[[list[float]], float] = sum
        if best.objective.name == MEAN_COMPLETION:
            total = best.value * sum(job.weight for job in instance.problem.jobs)
            energy = completion_energy(total, self.jobs)
        elif best.objective.name == DEVICE_TIME:
            energy = device_time_energy(best.objective.deadline, best.value, self.jobs)
        else:
            energy = makespan_energy(max(best.bound, best.value * 0.9))
            hot, cold, whole = 3.0, 0.03, max
        # Sometimes far afield, sometimes close to what is known.
        hot = max(hot * self.rng.choice((0.03, 0.3, 1.0)), cold * 2)
        best.offer(anneal(instance, best.schedule, energy, self.rng, clock, whole=whole, hot=hot, cold=cold))

    def _pack(self, clock: Clock) -> None:
        """One slice towards the present target; targets come down from the best makespan known.

        Found: down by another step. Not found for a while: half way up to the best makespan, keeping what
        is packed; and from there, in the end, afresh.
        """
        best = self.best
        if self.pool is None or self.seen != best.version:
            self._aim()
        assert self.pool is not None
        schedule = self.pool.run(clock)
        if schedule is not None:
            best.offer(schedule)
            return
        self.patience -= clock.elapsed
        if self.patience > 0:
            return
        step = (best.value - self.pool.end) / best.value / 2
        if step < _LEAST_STEP:
            self.pool = None
        else:
            self.pool.aim(best.value * (1 - step))
            self._wait()

    def _aim(self) -> None:
        best = self.best
        gap = best.value / best.bound - 1 if best.bound > 0 else 1.0
        step = min(_FIRST_STEP, max(gap * 0.3, _LEAST_STEP)) * self.rng.uniform(0.3, 1.0)
        self.pool = PoolSearch(best.instance, best.schedule, best.value * (1 - step), self.rng)
        self.seen = best.version
        self._wait()

    def _wait(self) -> None:
        self.patience = max(1.0, self.best.clock.limit * 0.08)
