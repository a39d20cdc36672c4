"""The search for better plans: which neighbourhood when, in one process.

Where a node runs few jobs, packing sets of jobs to a target makespan (:mod:`ejection_pool`) finds far better
plans than moving jobs around; where it runs many, or there is but one node, orders are searched
(:mod:`annealing`). Both start from the best schedule known, whoever found it. Small problems are also
modelled whole, with new random trees each time (:mod:`tree_packing`), and searched exactly
(:mod:`saturn_airflow.planning.exact_search.proofs`) by one of the processes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from saturn_airflow.planning import warming
from saturn_airflow.planning.clock import Clock, LookClock
from saturn_airflow.planning.exact_search.proofs import Descent
from saturn_airflow.planning.heuristics.annealing import (
    anneal,
    completion_energy,
    device_time_energy,
    makespan_energy,
)
from saturn_airflow.planning.heuristics.ejection_pool import PoolSearch
from saturn_airflow.planning.incumbent import Incumbent
from saturn_airflow.planning.objectives import DEVICE_TIME, MEAN_COMPLETION

if TYPE_CHECKING:
    from saturn_airflow.planning.heuristics.tree_packing import TreePacker

Search = Callable[[Clock], None]

#: Jobs per node up to which sets of jobs are packed; nodes up to which there are few.
_FEW_JOBS = 9
_FEW_NODES = 4
#: Jobs up to which the problem is modelled whole.
_TREES_JOBS = 40
#: Weight of the exact search, where there is one; the other searches' weights add up to about 1.
_DESCENT = 2.0
#: How far below the best makespan the target of packing is at first, and at least: as shares of it.
_FIRST_STEP = 0.01
_LEAST_STEP = 0.0002
#: Branches for packing a set of jobs, one of these is drawn; with more nodes than this it is the first.
_MANY_NODES = 16
_EFFORTS = (40, 150, 400)
_FEW_EFFORTS = (150, 400, 1500)


class Searcher:
    """Improves an incumbent, a slice of time at a time.

    :param exchange: called between slices, to tell other processes and hear from them.
    :param exactly: whether to look, among others, for a schedule that ends earlier until there is none.
    """

    def __init__(
        self,
        best: Incumbent,
        seed: int,
        exchange: Callable[[], None] = lambda: None,
        *,
        exactly: bool = False,
    ) -> None:
        self.best = best
        self.rng = random.Random(seed)
        self.exchange = exchange
        # How many.
        self.jobs = len(best.instance.problem.jobs)
        self.nodes = len(best.instance.problem.nodes)
        self.pool: PoolSearch | None = None
        self.seen_version = -1
        # Seconds of packing without success until the target comes nearer.
        self.patience = 0.0
        self.step = _FIRST_STEP
        self.trees: TreePacker | None = None
        self.descent = Descent(best)
        self.shares = self._shares()
        if exactly:
            self.shares[self._descend] = _DESCENT
        # Seconds of each search so far; a random fraction at first, so that processes begin with different
        # ones.
        self.spent = {search: self.rng.random() * 0.1 for search in self.shares}

    def run(self, clock: Clock) -> None:
        """Search until the plan is good enough or either clock is up."""
        if not warming.wait(clock):
            return
        # Seconds of a slice of each search.
        long = max(1.5, 0.15 * self.best.clock.limit)
        slices: dict[Search, float] = {}
        slices[self._pack] = 0.5
        slices[self._anneal] = long if self.nodes <= _FEW_NODES else 1.5
        slices[self._pack_trees] = long
        slices[self._descend] = 0.5
        while not (self.best.done or clock.expired):
            # The one whose time is shortest, by its share.
            search = min(self.shares, key=lambda search: self.spent[search] / self.shares[search])
            part = clock.within(min(self.best.clock.left, slices[search]))
            search(part)
            self.spent[search] += part.elapsed
            if self.nodes <= _FEW_NODES and search not in (self._pack, self._descend):
                # Slow cooling and long branching reach what short ones never do.
                slices[search] *= 1.5
            self.exchange()

    def _shares(self) -> dict[Search, float]:
        """The weight of each search: its part of the time is proportional to that."""
        if self.best.objective.name in (MEAN_COMPLETION, DEVICE_TIME):
            return {self._anneal: 1.0}
        if self.nodes == 1:
            shares: dict[Search, float] = {self._anneal: 0.8}
        elif self.jobs <= _FEW_JOBS * self.nodes:
            few = self.nodes <= _FEW_NODES
            shares = {self._pack: 0.5 if few else 0.85, self._anneal: 0.3 if few else 0.15}
        elif self.jobs <= 2 * _FEW_JOBS * self.nodes:
            shares = {self._pack: 0.2, self._anneal: 0.6}
        else:
            shares = {self._anneal: 1.0}
        if self.jobs <= _TREES_JOBS and not isinstance(self.best.clock, LookClock):
            shares[self._pack_trees] = 0.3
        return shares

    def _descend(self, clock: Clock) -> None:
        """One slice of the exact search for a schedule that ends earlier."""
        if self.descent.over:
            # Its turn comes again, perhaps for a better plan.
            self.spent[self._descend] += clock.limit
        else:
            self.descent.run(clock)

    def _pack_trees(self, clock: Clock) -> None:
        """One model of the whole problem."""
        # Pyomo is imported only where there is a model to solve.
        from saturn_airflow.planning.heuristics.tree_packing import TreePacker

        best = self.best
        if self.trees is None:
            self.trees = TreePacker(best.instance, self.rng)
        # Schedules up to 1 % longer than the best are of use: shifting left often makes up for more. And
        # HiGHS may take longer than it is given, so it is given less.
        schedule = self.trees.pack(clock.within(clock.left * 0.8), below=best.value * 1.01)
        if schedule is not None:
            best.offer(schedule)

    def _anneal(self, clock: Clock) -> None:
        """One run of simulated annealing, from hot to cold, starting from the best schedule."""
        best, instance = self.best, self.best.instance
        hot, cold = 0.3, 0.003
        if best.objective.name == MEAN_COMPLETION:
            total = best.value * sum(job.weight for job in instance.problem.jobs)
            energy = completion_energy(total, self.jobs)
        elif best.objective.name == DEVICE_TIME:
            energy = device_time_energy(best.objective.deadline, best.value, self.jobs)
        else:
            energy = makespan_energy(best.value)
            hot, cold = 1.0, 0.01
        # A hotter start leads further from the best schedule, a colder one stays near it.
        hot = max(hot * self.rng.choice((0.3, 1.0)), cold * 2)
        best.offer(anneal(instance, best.schedule, energy, self.rng, clock, hot=hot, cold=cold))

    def _pack(self, clock: Clock) -> None:
        """One slice towards a target below the best makespan known.

        Where one was found, the next target is a longer step down. Where none was for a while, a shorter
        step, keeping what is packed; and after the shortest, afresh from the best schedule.
        """
        best = self.best
        if self.pool is None or self.seen_version != best.version:
            self._start_pool()
        assert self.pool is not None
        schedule = self.pool.run(clock)
        if schedule is not None:
            self.step = min(_FIRST_STEP, self.step * 1.5)
            best.offer(schedule)
            return
        self.patience -= clock.elapsed
        if self.patience > 0:
            return
        self.step /= 2
        if self.step < _LEAST_STEP:
            self.step = _FIRST_STEP / 4
            self.pool = None
        else:
            self.pool.set_target(best.value * (1 - self.step))
            self._reset_patience()

    def _start_pool(self) -> None:
        """Begin packing anew, from the best schedule, towards a target at random within the step."""
        best = self.best
        if best.bound > 0:
            self.step = min(self.step, max((1 - best.bound / best.value) * 0.5, _LEAST_STEP))
        # With fewer nodes the same sets come up more often: each is worth more effort.
        effort = self.rng.choice(_FEW_EFFORTS if self.nodes <= _FEW_NODES else _EFFORTS)
        if self.nodes > _MANY_NODES:
            effort = _EFFORTS[0]
        end = best.value * (1 - self.step * self.rng.uniform(0.5, 1.0))
        self.pool = PoolSearch(best.instance, best.schedule, end, self.rng, effort)
        self.seen_version = best.version
        self._reset_patience()

    def _reset_patience(self) -> None:
        self.patience = max(1.0, self.best.clock.limit * 0.06)
