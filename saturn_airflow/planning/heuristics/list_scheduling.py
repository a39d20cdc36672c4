"""List scheduling: a first schedule in milliseconds, for any number of jobs.

For a target C, the jobs are taken longest first (each measured by its thriftiest mode that ends by C),
and each goes where it ends by C with the fewest device-seconds. C is then bisected. This is the
dual-approximation idea of Hochbaum and Shmoys (1987), with the longest-processing-time rule inside.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

from saturn_airflow.planning.clock import Clock
from saturn_airflow.planning.instances.instance import Instance
from saturn_airflow.planning.instances.schedule import Placed, Schedule

#: Targets to try at most.
_STEPS = 24


def list_schedule(instance: Instance, lower: float, clock: Clock) -> Schedule:
    """The best schedule over all targets that were tried.

    :param lower: a lower bound of the makespan in seconds, where the bisection starts.
    :param clock: checked after each target: the first is always tried.
    """
    best: Schedule = []
    upper = math.inf
    low, target = lower, lower
    for _ in range(_STEPS):
        schedule, end = min(
            (_for_target(instance, target, order) for order in _orders(instance, target)),
            key=lambda found: found[1],
        )
        if end < upper:
            best, upper = schedule, end
        if end <= target:
            high = target
        else:
            low = target
            high = upper
        if high <= low * 1.0005 or clock.expired:
            break
        # The first schedule may be many times as long as the bound: no step is longer than a quarter.
        target = min((low + high) / 2, low * 1.25)
    return best


def first_come(instance: Instance, *, shortest_first: bool = False) -> Schedule:
    """Each job in the order given, wherever and under whichever mode it ends first.

    :param shortest_first: in ascending order of least area over weight, instead.
    """
    order = list(range(len(instance.modes)))
    if shortest_first:
        groups = instance.classes
        order.sort(
            key=lambda job: groups[instance.class_of[job]].least_area / (_weight(instance, job) or 1e-9)
        )
    return _for_target(instance, 0.0, order)[0]


def _weight(instance: Instance, job: int) -> float:
    return instance.problem.jobs[job].weight


def _for_target(instance: Instance, target: float, order: Sequence[int]) -> tuple[Schedule, float]:
    """The jobs in this order, each where it ends by ``target`` with the least area, else where it ends first.

    :returns: the schedule and its makespan, which may be above the target.
    """
    free = [list(instance.types[kind].free) for kind in instance.type_of]
    schedule: Schedule = [[] for _ in free]
    latest = 0.0
    for job in order:
        release = instance.problem.jobs[job].release
        in_time: tuple[float, float] = (math.inf, math.inf)
        late = math.inf
        where: tuple[int, int] | None = None
        for node, devices in enumerate(free):
            for index, mode in enumerate(instance.modes[job][instance.type_of[node]]):
                start = max(devices[mode.devices - 1], release)
                end = start + mode.seconds
                if end <= target:
                    # Waiting devices are lost like used ones; ties go to the fullest node.
                    waste = sum(start - f for f in devices[: mode.devices])
                    if (mode.area + waste, -start) < in_time:
                        in_time, where = (mode.area + waste, -start), (node, index)
                elif in_time[0] == math.inf and end < late:
                    late, where = end, (node, index)
        assert where is not None, "a problem's job always fits somewhere"
        node, index = where
        mode = instance.modes[job][instance.type_of[node]][index]
        end = max(free[node][mode.devices - 1], release) + mode.seconds
        del free[node][: mode.devices]
        at = bisect_left(free[node], end)
        free[node][at:at] = [end] * mode.devices
        schedule[node].append(Placed(job, index))
        latest = max(latest, end)
    return schedule, latest


def _orders(instance: Instance, target: float) -> list[list[int]]:
    """The orders to try: longest first, and the same with jobs first that can't run on all types of node."""
    longest = sorted(range(len(instance.modes)), key=lambda job: _rank(instance, job, target))
    bound_first = sorted(longest, key=lambda job: all(instance.modes[job]))
    return [longest] if bound_first == longest else [longest, bound_first]


def _rank(instance: Instance, job: int, target: float) -> tuple[float, float]:
    """Key of the order: by release; then longest first, under the thriftiest mode that ends by ``target``."""
    modes = [mode for modes in instance.modes[job] for mode in modes]
    fitting = [mode for mode in modes if mode.seconds <= target] or [min(modes, key=lambda m: m.seconds)]
    thriftiest = min(fitting, key=lambda mode: mode.area)
    return (instance.problem.jobs[job].release, -thriftiest.seconds)
