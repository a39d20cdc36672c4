"""Plans that know that a boundary is coming, at which jobs may change their strategies.

A plan that is never looked at again ends raggedly, unless jobs run wider than is thrifty so that all end
together. With a boundary to come there is no need: until then the jobs run as thriftily as they can, and
after it what is left of them is spread over all devices. So what counts is not when the plan itself ends, but
how many device-seconds it leaves for after the boundary: for each job those of the thriftiest mode that still
ends by the target.
"""

from __future__ import annotations

import random
from bisect import bisect_right

from saturn_airflow.planning.annealing import Item, anneal
from saturn_airflow.planning.clock import Clock
from saturn_airflow.planning.instance import Instance
from saturn_airflow.planning.schedule import Schedule, left_shift

_HOT, _COLD = 0.3, 0.003
_PASSES = 2
#: A job that no mode ends in time counts for so many times its area.
_LATE = 3.0


def foresee(
    instance: Instance, schedule: Schedule, boundary: float, target: float, seed: int, clock: Clock
) -> Schedule:
    """A schedule that leaves little for after ``boundary``.

    :param schedule: where to start.
    :param boundary: seconds from now at which jobs may be moved.
    :param target: seconds from now by which all is to be done; improved on the way.
    """
    rng = random.Random(seed)
    devices = instance.devices
    for _ in range(_PASSES):
        rest = _Rest(instance, boundary, target)
        part = clock.within(clock.limit / _PASSES)
        schedule = anneal(instance, schedule, rest.energy, rng, part, hot=_HOT, cold=_COLD)
        target = boundary + rest.area(instance, schedule) / devices * 1.01
    return [left_shift(instance, node, row) for node, row in enumerate(schedule)]


class _Rest:
    """What a schedule leaves for after a boundary, in device-seconds."""

    def __init__(self, instance: Instance, boundary: float, target: float) -> None:
        self.boundary = boundary
        self.horizon = max(target - boundary, 1e-9)
        self.scale = len(instance.problem.jobs) / (instance.devices * target)
        self.modes = [
            [(mode.seconds, mode.area) for modes in instance.modes[job] for mode in modes]
            for job in range(len(instance.problem.jobs))
        ]
        self.most = [max(area for _, area in modes) for modes in self.modes]

    def energy(self, row: list[Item], devices: int) -> float:
        """Scaled so that a whole schedule's are of the order of its number of jobs."""
        boundary, horizon = self.boundary, self.horizon
        free = [0.0] * devices
        total = 0.0
        for wanted, seconds, release, _, job, _ in row:
            start = free[wanted - 1]
            if release > start:
                start = release
            end = start + seconds
            del free[:wanted]
            at = bisect_right(free, end)
            free[at:at] = [end] * wanted
            if end <= boundary:
                continue
            left = 1.0 if start >= boundary else (end - boundary) / seconds
            fitting = [area for mode, area in self.modes[job] if mode * left <= horizon]
            total += left * (min(fitting) if fitting else _LATE * self.most[job])
        return total * self.scale

    def area(self, instance: Instance, schedule: Schedule) -> float:
        """Device-seconds left by the whole schedule."""
        total = 0.0
        for node, row in enumerate(schedule):
            kind = instance.type_of[node]
            items = []
            for job, index in row:
                mode = instance.modes[job][kind][index]
                items.append(
                    Item(mode.devices, mode.seconds, instance.problem.jobs[job].release, 1.0, job, index)
                )
            total += self.energy(items, instance.types[kind].devices)
        return total / self.scale
