"""List scheduling: a first schedule in milliseconds, for any number of jobs.

For a target C, the jobs are taken longest first (each measured by its thriftiest mode that ends by C),
and each goes where it ends by C with the fewest device-seconds. C is then bisected. This is the
dual-approximation idea of Hochbaum and Shmoys (1987), with the longest-processing-time rule inside. The same
is tried with jobs first that few nodes can run by C and, with releases, from C back to 0.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

from saturn_airflow.planning.clock import Clock
from saturn_airflow.planning.instances.instance import Instance, Mode
from saturn_airflow.planning.instances.schedule import Placed, PlacedRun, Schedule, left_shift, makespan

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
        schedule, end = min(_for_target_each_way(instance, target), key=lambda found: found[1])
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
    releases = [job.release for job in instance.problem.jobs]
    rows = _listed(instance, order, free, releases, [target] * len(order))
    schedule = [[Placed(run.job, run.mode) for run in row] for row in rows]
    return schedule, max(run.end for row in rows for run in row)


def _backwards(instance: Instance, target: float) -> tuple[Schedule, float]:
    """The jobs from ``target`` back to 0, those released last first: no device waits for a release.

    What is begun too early is then shifted to where it may start.
    """
    releases = [job.release for job in instance.problem.jobs]
    order = sorted(_longest_first(instance, target), key=lambda job: -releases[job])
    free = [[0.0] * instance.types[kind].devices for kind in instance.type_of]
    rows = _listed(instance, order, free, [0.0] * len(order), [target - release for release in releases])
    schedule = [
        left_shift(instance, node, [Placed(run.job, run.mode) for run in sorted(row, key=lambda r: -r.end)])
        for node, row in enumerate(rows)
    ]
    return schedule, makespan(instance, schedule)


def _listed(
    instance: Instance,
    order: Sequence[int],
    free: list[list[float]],
    releases: Sequence[float],
    deadlines: Sequence[float],
) -> list[list[PlacedRun]]:
    """The jobs in this order, each where it ends in time with the least area, else where it ends first.

    :param free: (nodes, devices) when each device becomes free, ascending; changed.
    :param deadlines: (jobs,) seconds, as ``releases``: by when each is in time.
    :returns: the jobs of each node, in this order.
    """
    rows: list[list[PlacedRun]] = [[] for _ in free]
    for job in order:
        in_time: tuple[float, float] = (math.inf, math.inf)
        late = math.inf
        where: tuple[int, int] | None = None
        for node, devices in enumerate(free):
            for index, mode in enumerate(instance.modes[job][instance.type_of[node]]):
                start = max(devices[mode.devices - 1], releases[job])
                end = start + mode.seconds
                if end <= deadlines[job]:
                    # Waiting devices are lost like used ones; ties go to the fullest node.
                    waste = sum(start - f for f in devices[_taken(devices, mode.devices, start)])
                    if (mode.area + waste, -start) < in_time:
                        in_time, where = (mode.area + waste, -start), (node, index)
                elif in_time[0] == math.inf and end < late:
                    late, where = end, (node, index)
        assert where is not None, "a problem's job always fits somewhere"
        node, index = where
        mode = instance.modes[job][instance.type_of[node]][index]
        start = max(free[node][mode.devices - 1], releases[job])
        end = start + mode.seconds
        del free[node][_taken(free[node], mode.devices, start)]
        at = bisect_left(free[node], end)
        free[node][at:at] = [end] * mode.devices
        rows[node].append(PlacedRun(job, index, start, end))
    return rows


def _taken(devices: Sequence[float], wanted: int, start: float) -> slice:
    """Which devices a job takes, of those that are free by its start: the last ones, as in a schedule."""
    until = bisect_right(devices, start)
    return slice(until - wanted, until)


def _for_target_each_way(instance: Instance, target: float) -> Iterator[tuple[Schedule, float]]:
    """Schedules for one target, and their makespans: by release and then longest first; the same with jobs
    first that few nodes can run by then; and, with releases, backwards."""
    releases = [job.release for job in instance.problem.jobs]
    longest = sorted(_longest_first(instance, target), key=lambda job: releases[job])
    yield _for_target(instance, target, longest)
    choosy_first = sorted(longest, key=lambda job: _nodes_in_time(instance, job, target))
    if choosy_first != longest:
        yield _for_target(instance, target, choosy_first)
    if instance.has_releases:
        yield _backwards(instance, target)


def _longest_first(instance: Instance, target: float) -> list[int]:
    """The jobs, the longest first under the thriftiest mode that takes no longer than ``target``."""
    jobs = range(len(instance.modes))
    return sorted(jobs, key=lambda job: -_thriftiest(instance, job, target).seconds)


def _thriftiest(instance: Instance, job: int, target: float) -> Mode:
    """The mode of least area among those that take no longer than ``target``; else the fastest."""
    modes = [mode for modes in instance.modes[job] for mode in modes]
    fitting = [mode for mode in modes if mode.seconds <= target]
    return min(fitting, key=lambda mode: mode.area) if fitting else min(modes, key=lambda m: m.seconds)


def _nodes_in_time(instance: Instance, job: int, target: float) -> int:
    """How many nodes the job could end on by ``target``, were it alone there."""
    by_type = zip(instance.types, instance.modes[job], strict=True)
    return sum(
        len(kind.nodes)
        for kind, modes in by_type
        if any(kind.free[mode.devices - 1] + mode.seconds <= target for mode in modes)
    )
