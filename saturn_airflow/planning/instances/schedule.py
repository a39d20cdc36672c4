"""Schedules inside the planner: for each node its jobs and modes in order of start.

The order is all there is to decide: given it, each job starts at the earliest second at which enough
devices of its node are free (and it is released), on the devices that became free first. Every
left-shifted schedule is reached by the order of its own starts, so nothing is lost by keeping only
orders, and no job can ever overlap another.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from saturn_airflow.model.plan import Assignment
from saturn_airflow.planning.instances.instance import Instance


class Placed(NamedTuple):
    """A job under one of its modes (``instance.modes[job][type of the node][mode]``)."""

    job: int
    mode: int


Row = list[Placed]
Schedule = list[Row]
"""One row per node of the problem."""


class PlacedRun(NamedTuple):
    """A job with its times."""

    job: int
    mode: int
    start: float
    end: float


def times(instance: Instance, node: int, row: Iterable[Placed]) -> list[PlacedRun]:
    """Starts and ends of the jobs of ``row`` on ``node``: in this order, each as early as devices allow."""
    kind = instance.type_of[node]
    # When each device becomes free, ascending: a job that wants g of them can start when the g-th is.
    free = list(instance.types[kind].free)
    runs = []
    for job, mode in row:
        devices, seconds, _ = instance.modes[job][kind][mode]
        start = free[devices - 1]
        if instance.has_releases:
            start = max(start, instance.problem.jobs[job].release)
        end = start + seconds
        # Of the devices that are free by the start, it takes those that became free last: a job further down
        # the row that is narrow enough may still use the gap that the others have had for longer.
        taken = bisect_right(free, start)
        del free[taken - devices : taken]
        at = bisect_right(free, end)
        free[at:at] = [end] * devices
        runs.append(PlacedRun(job, mode, start, end))
    return runs


def left_shift(instance: Instance, node: int, row: Row) -> Row:
    """The row in order of its own starts, again and again, until nothing starts earlier.

    Taking the jobs in order of start never delays one: when a job's turn comes, the devices it had are
    free at its old start at the latest. So each pass is at least as good as the one before.
    """
    while True:
        runs = sorted(times(instance, node, row), key=lambda run: (run.start, run.end))
        again = [Placed(run.job, run.mode) for run in runs]
        if again == row:
            return row
        row = again


def makespan(instance: Instance, schedule: Schedule) -> float:
    """End of the last job of all nodes."""
    return max(
        (run.end for node, row in enumerate(schedule) for run in times(instance, node, row)), default=0.0
    )


def assignments(instance: Instance, schedule: Schedule) -> tuple[Assignment, ...]:
    """The schedule as a plan's assignments, with device ids, in order of start."""
    found = []
    for node, row in enumerate(schedule):
        runs = sorted(times(instance, node, row), key=lambda run: (run.start, run.end))
        kind = instance.type_of[node]
        modes = [instance.modes[run.job][kind][run.mode] for run in runs]
        spans = [(run.start, run.end, mode.devices) for run, mode in zip(runs, modes, strict=True)]
        free = instance.problem.free_of(instance.problem.nodes[node])
        for run, mode, ids in zip(runs, modes, colour(spans, free), strict=True):
            job = instance.problem.jobs[run.job]
            found.append(
                Assignment(
                    job=job.name,
                    technique=job.options[mode.option].technique,
                    devices=mode.devices,
                    node=instance.problem.nodes[node].name,
                    device_ids=ids,
                    start=run.start,
                    end=run.end,
                )
            )
    return tuple(sorted(found, key=lambda a: (a.start, a.node, a.device_ids)))


def colour(spans: Sequence[tuple[float, float, int]], free_at: Iterable[float]) -> list[tuple[int, ...]]:
    """Device ids for jobs whose times are settled: colouring of an interval graph, greedy by start.

    That never takes more devices than are in use at once (Golumbic, Algorithmic Graph Theory and Perfect
    Graphs, 1980, ch. 8 on interval graphs).

    :param spans: start, end and number of devices of each job, in order of start; at no time more together
        than there are.
    :param free_at: when each device becomes free.
    :returns: ids for each job; runs of neighbouring ids are preferred, since neighbours often share a
        faster link.
    """
    free_at = list(free_at)
    found = []
    for start, end, wanted in spans:
        free = [device for device in range(len(free_at)) if free_at[device] <= start]
        assert len(free) >= wanted, "more devices in use than there are"
        ids = _together(free, wanted)
        for device in ids:
            free_at[device] = end
        found.append(ids)
    return found


def _together(free: Sequence[int], wanted: int) -> tuple[int, ...]:
    """``wanted`` of the ids ``free`` (ascending) that lie closest together, aligned where that is a tie."""
    starts = range(len(free) - wanted + 1)
    at = min(starts, key=lambda at: (free[at + wanted - 1] - free[at], free[at] % wanted, free[at]))
    return tuple(free[at : at + wanted])
