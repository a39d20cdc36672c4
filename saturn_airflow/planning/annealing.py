"""Neighbourhood search over orders and modes by simulated annealing, for any objective.

The state is a schedule as :mod:`schedule` keeps it: for each node an order of jobs with their modes. A move
exchanges two jobs of two nodes, moves one to another node, or changes mode and place within a node; modes
may change on the way. A node's energy comes from its row alone, so a move costs microseconds.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Callable
from typing import NamedTuple

from saturn_airflow.planning.clock import Clock
from saturn_airflow.planning.instance import Instance
from saturn_airflow.planning.schedule import Placed, Schedule


class Item(NamedTuple):
    """A job under a mode, with all that evaluating it takes."""

    devices: int
    seconds: float
    release: float
    weight: float
    job: int
    mode: int


Energy = Callable[[list[Item], int], float]
"""Energy of a row of items on a node with so many devices."""


def last_end(row: list[Item], devices: int) -> float:
    """When the last job of the row ends."""
    free = [0.0] * devices
    for wanted, seconds, release, *_ in row:
        start = free[wanted - 1]
        end = (start if start > release else release) + seconds
        del free[:wanted]
        at = bisect_right(free, end)
        free[at:at] = [end] * wanted
    return free[-1]


def weighted_ends(row: list[Item], devices: int) -> float:
    """Sum over the row's jobs of weight x end."""
    free = [0.0] * devices
    total = 0.0
    for wanted, seconds, release, weight, _, _ in row:
        start = free[wanted - 1]
        end = (start if start > release else release) + seconds
        total += weight * end
        del free[:wanted]
        at = bisect_right(free, end)
        free[at:at] = [end] * wanted
    return total


def makespan_energy(target: float) -> Energy:
    """(last end / target)^40: the longest rows count, all others hardly."""
    return lambda row, devices: (last_end(row, devices) / target) ** _POWER


def completion_energy(total: float, jobs: int) -> Energy:
    """Weighted ends, scaled so that a whole schedule of value ``total`` has energy ``jobs``."""
    scale = jobs / total
    return lambda row, devices: weighted_ends(row, devices) * scale


def device_time_energy(deadline: float, area: float, jobs: int) -> Energy:
    """Device-seconds, scaled so that ``area`` has energy ``jobs``, and a steep price for ending late."""
    scale = jobs / area

    def energy(row: list[Item], devices: int) -> float:
        late = last_end(row, devices) / deadline - 1
        used = sum([item.devices * item.seconds for item in row]) * scale
        return used + (_LATE * jobs * late + 1 if late > 0 else 0.0)

    return energy


def anneal(
    instance: Instance,
    schedule: Schedule,
    energy: Energy,
    rng: random.Random,
    clock: Clock,
    *,
    whole: Callable[[list[float]], float] = sum,
    hot: float,
    cold: float,
) -> Schedule:
    """The best schedule met while cooling from ``hot`` to ``cold`` until the time is up.

    :param whole: what is minimised of the nodes' energies: their ``sum``, or their ``max``.
    """
    kinds = instance.type_of
    devices = [instance.types[kind].devices for kind in kinds]
    items = [
        [
            [Item(m.devices, m.seconds, job.release, job.weight, index, at) for at, m in enumerate(modes)]
            for modes in instance.modes[index]
        ]
        for index, job in enumerate(instance.problem.jobs)
    ]
    rows = [[items[job][kinds[node]][mode] for job, mode in row] for node, row in enumerate(schedule)]
    energies = [energy(row, devices[node]) for node, row in enumerate(rows)]
    best, best_rows = whole(energies), list(rows)
    draw, exp = rng.random, math.exp
    nodes = len(rows)
    temperature, rate, steps = hot, cold / hot, 0

    def other_mode(item: Item, node: int) -> Item | None:
        """The item on ``node``: as it is as often as not, otherwise under any mode."""
        modes = items[item.job][kinds[node]]
        if not modes:
            return None
        if draw() < 0.55:
            return modes[min(item.mode, len(modes) - 1)]
        return modes[int(draw() * len(modes))]

    while True:
        steps += 1
        if not steps & 127:
            if clock.expired:
                break
            temperature = hot * rate ** (clock.elapsed / clock.limit)
        one = int(draw() * nodes)
        row = rows[one]
        if not row:
            continue
        choice = draw()
        at = int(draw() * len(row))
        if nodes > 1 and choice < 0.6:
            two = int(draw() * (nodes - 1))
            two += two >= one
            here, there = row[:], rows[two][:]
            came = other_mode(row[at], two)
            if came is None:
                continue
            if choice < 0.4 and there:
                back_at = int(draw() * len(there))
                back = other_mode(there[back_at], one)
                if back is None:
                    continue
                here[at], there[back_at] = back, came
            else:
                del here[at]
                there.insert(int(draw() * (len(there) + 1)), came)
            energy_here, energy_there = energy(here, devices[one]), energy(there, devices[two])
            change = energy_here + energy_there - energies[one] - energies[two]
            if change > 0 and draw() >= exp(-change / temperature):
                continue
            rows[two], energies[two] = there, energy_there
        else:
            here = row[:]
            item = here.pop(at)
            if choice < 0.85:
                modes = items[item.job][kinds[one]]
                item = modes[int(draw() * len(modes))]
            here.insert(at if choice < 0.75 else int(draw() * len(row)), item)
            energy_here = energy(here, devices[one])
            change = energy_here - energies[one]
            if change > 0 and draw() >= exp(-change / temperature):
                continue
        rows[one], energies[one] = here, energy_here
        if change < 0 and whole(energies) < best:
            best, best_rows = whole(energies), list(rows)
    return [[Placed(item.job, item.mode) for item in row] for row in best_rows]


_POWER = 40
_LATE = 20.0
