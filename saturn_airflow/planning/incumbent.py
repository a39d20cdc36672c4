"""The best schedule so far and the best bound so far: what every part of a solve reads and improves."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from saturn_airflow.planning.clock import Clock
from saturn_airflow.planning.instances.instance import Instance
from saturn_airflow.planning.instances.schedule import Schedule, left_shift
from saturn_airflow.planning.objectives import PlanObjective


class SolveProgress(NamedTuple):
    """How far a solve has come.

    :param seconds: since its start.
    :param value: of the best plan so far (seconds; device-seconds for the device-time objective).
    :param bound: proven: no plan is better.
    """

    seconds: float
    value: float
    bound: float

    @property
    def gap(self) -> float:
        """How much worse than the best conceivable plan the best so far may be, as a share."""
        return self.value / self.bound - 1 if self.bound > 0 else math.inf


class Incumbent:
    """Keeps the better schedule, the higher bound, and tells ``on_progress`` of each.

    ``version`` counts the schedules that were taken: who remembers one sees whether there was a better one
    since.

    :param enough: the gap at which to stop, as a share (0.01: one per cent).
    :param target: the value at which to stop.
    :param all_wait: whether nothing runs until there is a plan: then the time is up as soon as it took as
        long as any better plan could save.
    """

    def __init__(
        self,
        instance: Instance,
        objective: PlanObjective,
        clock: Clock,
        enough: float = 0.0,
        on_progress: Callable[[SolveProgress], None] | None = None,
        target: float = 0.0,
        all_wait: bool = False,
    ) -> None:
        self.instance = instance
        self.objective = objective
        self.clock = clock
        self.enough = enough
        self.on_progress = on_progress
        self.target = target
        self.all_wait = all_wait
        self.schedule: Schedule = []
        self.value = math.inf
        self.bound = 0.0
        self.version = 0

    @property
    def done(self) -> bool:
        """Whether the plan is optimal or good enough, or the time is up."""
        return self.clock.expired or self.proven

    @property
    def proven(self) -> bool:
        """Whether the plan is as good as was asked for."""
        return self.value <= max(self.target, self.bound * (1 + max(self.enough, _EXACT)))

    def offer(self, schedule: Schedule) -> bool:
        """Take ``schedule``, shifted left, if it is better; whether it was."""
        shifted = [left_shift(self.instance, node, row) for node, row in enumerate(schedule)]
        value = self.objective.value(self.instance, shifted)
        if not value < self.value:
            return False
        self.schedule, self.value = shifted, value
        self.version += 1
        self._tell()
        return True

    def raise_bound(self, bound: float) -> None:
        """Take ``bound``, rounded up to what a value can be, if it is higher."""
        if not math.isfinite(bound):
            return
        bound = self.objective.round_up(self.instance, bound)
        if bound > self.bound:
            self.bound = min(bound, self.value)
            self._tell()

    def _tell(self) -> None:
        if self.all_wait:
            self.clock.limit = min(self.clock.limit, self.value - self.bound)
        if self.on_progress is not None and math.isfinite(self.value):
            self.on_progress(SolveProgress(self.clock.elapsed, self.value, self.bound))


#: Relative difference of value and bound below which a plan counts as optimal: above the tolerance of 1e-8
#: that bounds are lowered by (see :meth:`PlanObjective.round_up`).
_EXACT = 3e-8
