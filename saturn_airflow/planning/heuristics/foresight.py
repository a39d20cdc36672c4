"""Plans that know that a boundary is coming, at which jobs may change their strategies.

A plan that is never looked at again ends raggedly, unless jobs run wider than is thrifty so that all end
together. With a boundary to come there is no need: until then the jobs run as thriftily as they can, and
after it what is left of them is spread over all devices. So what counts is not when the plan itself ends, but
how many device-seconds it leaves for after the boundary: for each job those of the thriftiest mode that still
ends by the target.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from typing import NamedTuple

from saturn_airflow.planning.clock import Clock
from saturn_airflow.planning.instances.instance import Instance
from saturn_airflow.planning.instances.schedule import Placed, Schedule, left_shift

#: Temperatures of the annealing at the start and at the end, in energies of a job.
_HOT, _COLD = 0.3, 0.003
#: How often to anneal: the first result says by when all can be done, which the second aims at.
_PASSES = 2
#: A job that no mode ends in time counts for so many times its area.
_LATE = 3.0


class ForeseenJob(NamedTuple):
    """A job under a mode."""

    devices: int
    seconds: float
    release: float
    job: int
    mode: int


Row = list[ForeseenJob]


def foresee(
    instance: Instance, schedule: Schedule, boundary: float, target: float, seed: int, clock: Clock
) -> Schedule:
    """A schedule that leaves few device-seconds for after ``boundary``, found by simulated annealing.

    :param schedule: where to start.
    :param boundary: seconds from now at which jobs may be moved.
    :param target: seconds from now by which all is to be done; a better one is found on the way.
    """
    rng = random.Random(seed)
    items = [
        [
            [
                ForeseenJob(m.devices, m.seconds, instance.problem.jobs[job].release, job, at)
                for at, m in enumerate(modes)
            ]
            for modes in by_type
        ]
        for job, by_type in enumerate(instance.modes)
    ]
    on_node = [[by_type[kind] for by_type in items] for kind in instance.type_of]
    rows = [[on_node[node][job][mode] for job, mode in row] for node, row in enumerate(schedule)]
    for _ in range(_PASSES):
        rest = _RemainingArea(instance, boundary, target)
        rows = _anneal(rows, on_node, rest, rng, clock.within(clock.limit / _PASSES))
        # When the devices, all busy from the boundary on, have done what is left; and 1 % for what does not
        # fit.
        target = boundary + rest.area(rows) / instance.devices * 1.01
    found = [[Placed(item.job, item.mode) for item in row] for row in rows]
    return [left_shift(instance, node, row) for node, row in enumerate(found)]


class _RemainingArea:
    """What a schedule leaves for after a boundary, in device-seconds.

    For each job the share that is not trained by then, times the device-seconds of its thriftiest mode that
    still ends by the target (or, where none does, a penalty). ``modes`` has seconds and area of each job's
    modes on any node, since it may be moved at the boundary.
    """

    def __init__(self, instance: Instance, boundary: float, target: float) -> None:
        self.boundary = boundary
        self.horizon = max(target - boundary, 1e-9)
        self.scale = len(instance.problem.jobs) / (instance.devices * target)
        self.modes = [
            [(mode.seconds, mode.area) for modes in instance.modes[job] for mode in modes]
            for job in range(len(instance.problem.jobs))
        ]
        self.most = [max(area for _, area in modes) for modes in self.modes]
        self.free = [instance.types[kind].free for kind in instance.type_of]

    def energy(self, row: Row, node: int) -> float:
        """What one row leaves, scaled so that a whole schedule has about as much as it has jobs."""
        boundary, horizon = self.boundary, self.horizon
        free = list(self.free[node])
        total = 0.0
        for wanted, seconds, release, job, _ in row:
            start = free[wanted - 1]
            if release > start:
                start = release
            end = start + seconds
            # The devices that were free first, which are free again together; the list stays sorted.
            del free[:wanted]
            at = bisect_right(free, end)
            free[at:at] = [end] * wanted
            if end <= boundary:
                continue
            left = 1.0 if start >= boundary else (end - boundary) / seconds
            fitting = [area for mode, area in self.modes[job] if mode * left <= horizon]
            total += left * (min(fitting) if fitting else _LATE * self.most[job])
        return total * self.scale

    def area(self, rows: list[Row]) -> float:
        """Device-seconds left by the whole schedule."""
        return sum(self.energy(row, node) for node, row in enumerate(rows)) / self.scale


def _anneal(
    rows: list[Row],
    on_node: list[list[list[ForeseenJob]]],
    rest: _RemainingArea,
    rng: random.Random,
    clock: Clock,
) -> list[Row]:
    """The best rows met while cooling until the time is up.

    :param on_node: by node and job, the job under each of its modes there.
    """
    rows, draw = list(rows), rng.random
    energies = [rest.energy(row, node) for node, row in enumerate(rows)]
    best, least = list(rows), sum(energies)
    temperature, steps = _HOT, 0
    while True:
        steps += 1
        if steps % _LOOK_EVERY == 0:
            if clock.expired:
                return best
            temperature = _HOT * (_COLD / _HOT) ** clock.gone
        one = int(draw() * len(rows))
        two = int(draw() * len(rows)) if draw() < _BETWEEN else one
        if not rows[one]:
            continue
        changed = {one: rows[one][:]}
        item = changed[one].pop(int(draw() * len(changed[one])))
        changed.setdefault(two, rows[two][:])
        if two != one and changed[two] and draw() < _EXCHANGE:
            back = changed[two].pop(int(draw() * len(changed[two])))
            if not (modes := on_node[one][back.job]):
                continue
            changed[one].insert(int(draw() * (len(changed[one]) + 1)), _mode(modes, back, draw()))
        if not (modes := on_node[two][item.job]):
            continue
        changed[two].insert(int(draw() * (len(changed[two]) + 1)), _mode(modes, item, draw()))
        new = {node: rest.energy(row, node) for node, row in changed.items()}
        change = sum(new.values()) - sum(energies[node] for node in new)
        if change > 0 and draw() >= math.exp(-change / temperature):
            continue
        for node, row in changed.items():
            rows[node], energies[node] = row, new[node]
        if change < 0 and sum(energies) < least:
            best, least = list(rows), sum(energies)


def _mode(modes: list[ForeseenJob], item: ForeseenJob, drawn: float) -> ForeseenJob:
    """The item under its own mode half of the time, otherwise under any of them.

    :param modes: the job's on the node it goes to.
    :param drawn: a random number from 0 to below 1.
    """
    return (
        modes[min(item.mode, len(modes) - 1)] if drawn < 0.5 else modes[int((drawn - 0.5) * 2 * len(modes))]
    )


#: Moves between two looks at the clock.
_LOOK_EVERY = 64
#: Share of the moves that take a job to a node drawn anew, and of those the share that bring another back.
_BETWEEN = 0.6
_EXCHANGE = 0.6
