"""Neighbourhood search over orders and modes by simulated annealing, for any objective.

The state is a schedule as :mod:`schedule` keeps it: for each node an order of jobs with their modes. A move
exchanges two jobs of two nodes, moves one to another node, or changes mode and place within a node; modes
may change on the way. A node's energy comes from its row alone, so a move costs less than a microsecond.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np

from saturn_airflow.planning.clock import Clock
from saturn_airflow.planning.compiled import compiled
from saturn_airflow.planning.heuristics.xorshift import draw, seeded
from saturn_airflow.planning.instances.arrays import Floats, Ints, Words, free_by_node, modes_of
from saturn_airflow.planning.instances.instance import Instance
from saturn_airflow.planning.instances.schedule import Placed, Schedule

_ENDS, _WEIGHTED_ENDS, _DEVICE_TIME = 0, 1, 2
#: Exponent of the makespan's energy: a row that is a tenth shorter than the longest counts 1.5 % of it.
_POWER = 40.0
#: What a deadline that is missed by its own length costs, in energies of a job.
_LATE = 20.0
#: Moves between two looks at the clock, at most and at least.
_MOVES_AT_ONCE, _LEAST_MOVES = 2000, 20
#: Steps of the loop over devices that take some milliseconds.
_STEPS_AT_ONCE = 4_000_000


class Energy(NamedTuple):
    """What a row costs, and what is minimised of all rows: their sum, or for the makespan the largest.

    Use one of the functions below to make one.

    :param name: which: _ENDS, _WEIGHTED_ENDS or _DEVICE_TIME.
    :param scale: factor of the row's seconds or device-seconds.
    :param deadline: seconds.
    :param late: what missing the deadline by its own length costs.
    """

    name: int
    scale: float
    deadline: float = np.inf
    late: float = 0.0


def makespan_energy(target: float) -> Energy:
    """(last end / target)^40: the longest rows count, all others hardly."""
    return Energy(_ENDS, 1 / target)


def completion_energy(total: float, jobs: int) -> Energy:
    """Weighted ends, scaled so that a whole schedule of value ``total`` has energy ``jobs``."""
    return Energy(_WEIGHTED_ENDS, jobs / total)


def device_time_energy(deadline: float, area: float, jobs: int) -> Energy:
    """Device-seconds, scaled so that ``area`` has energy ``jobs``, and a steep price for ending late."""
    return Energy(_DEVICE_TIME, jobs / area, deadline, _LATE * jobs)


def anneal(
    instance: Instance,
    schedule: Schedule,
    energy: Energy,
    rng: random.Random,
    clock: Clock,
    *,
    hot: float,
    cold: float,
) -> Schedule:
    """The best schedule met while cooling from ``hot`` to ``cold`` until the time is up.

    :param hot: temperature at the start, in units of ``energy``; it falls geometrically to ``cold``.
    """
    problem = _problem(instance)
    state = _state(instance, schedule)
    energies = _row_energies(problem, energy, state)
    best = AnnealingState(*(part.copy() for part in state))
    reached = np.array([_schedule_energy(energy, energies)])
    seed = seeded(rng)
    while True:
        temperature = hot * (cold / hot) ** clock.gone
        if energy.name == _ENDS:
            # Scaled by the best makespan so far, the longest rows have an energy of about 1 all the way down:
            # else the 40th power would make it vanish as schedules get better.
            longest = reached[0] ** (1 / _POWER) / energy.scale
            energy = makespan_energy(longest)
            energies, reached[0] = _row_energies(problem, energy, state), 1.0
        moves = _moves_per_look(problem, state)
        _make_moves(problem, energy, state, energies, best, reached, temperature, moves, seed)
        if clock.expired:
            return _schedule(instance, best)


def _moves_per_look(problem: Arrays, state: AnnealingState) -> int:
    """How many moves to make between two looks at the clock."""
    steps_of_one = int(problem.widths.max() * (state.lengths.max() + 1))
    return max(_LEAST_MOVES, min(_MOVES_AT_ONCE, _STEPS_AT_ONCE // steps_of_one))


class Arrays(NamedTuple):
    """The instance, by job instead of class.

    :param devices: (types, jobs, most modes) of each mode.
    :param seconds: (types, jobs, most modes) of each mode; infinite where there is none.
    :param modes: (types, jobs) how many there are.
    :param releases: (jobs,) seconds.
    :param weights: (jobs,)
    :param types: (nodes,) the type of each.
    :param widths: (nodes,) devices of each.
    :param free: (nodes, most devices) when devices become free, ascending.
    """

    devices: Ints
    seconds: Floats
    modes: Ints
    releases: Floats
    weights: Floats
    types: Ints
    widths: Ints
    free: Floats


class AnnealingState(NamedTuple):
    """A schedule.

    :param jobs: (nodes, jobs) the job at each place of each row.
    :param modes: (nodes, jobs) and its mode.
    :param lengths: (nodes,) of the rows; what stands beyond means nothing.
    """

    jobs: Ints
    modes: Ints
    lengths: Ints


def _problem(instance: Instance) -> Arrays:
    classes = np.array(instance.class_of)
    tables = [modes_of(instance, kind) for kind in range(len(instance.types))]
    most = max(table.seconds.shape[1] for table in tables)
    devices = np.ones((len(tables), len(classes), most), dtype=np.int64)
    seconds = np.full((len(tables), len(classes), most), np.inf)
    for kind, table in enumerate(tables):
        devices[kind, :, : table.devices.shape[1]] = table.devices[classes]
        seconds[kind, :, : table.seconds.shape[1]] = table.seconds[classes]
    return Arrays(
        devices,
        seconds,
        np.isfinite(seconds).sum(axis=2),
        np.array([job.release for job in instance.problem.jobs], dtype=float),
        np.array([job.weight for job in instance.problem.jobs], dtype=float),
        np.array(instance.type_of),
        np.array([node.devices for node in instance.problem.nodes]),
        free_by_node(instance),
    )


def _state(instance: Instance, schedule: Schedule) -> AnnealingState:
    shape = (len(schedule), len(instance.modes))
    state = AnnealingState(
        np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.array([len(r) for r in schedule])
    )
    for node, row in enumerate(schedule):
        for at, placed in enumerate(row):
            state.jobs[node, at], state.modes[node, at] = placed
    return state


def _schedule(instance: Instance, state: AnnealingState) -> Schedule:
    return [
        [Placed(int(job), int(mode)) for job, mode in zip(jobs[:length], modes[:length], strict=True)]
        for jobs, modes, length in zip(*state, strict=True)
    ]


@compiled
def _schedule_energy(energy: Energy, energies: Floats) -> float:
    """What is minimised: the largest of the rows' energies for the makespan, otherwise their sum."""
    largest = total = 0.0
    for each in energies:
        largest, total = max(largest, each), total + each
    return largest if energy.name == _ENDS else total


@compiled
def _widest(problem: Arrays) -> int:
    most = 0
    for width in problem.widths:
        most = max(most, width)
    return most


@compiled
def _row_energies(problem: Arrays, energy: Energy, state: AnnealingState) -> Floats:
    found = np.zeros(len(state.lengths))
    free = np.zeros(_widest(problem))
    for node in range(len(found)):
        found[node] = _row_energy(
            problem, energy, node, state.jobs[node], state.modes[node], state.lengths[node], free
        )
    return found


@compiled
def _row_energy(
    problem: Arrays, energy: Energy, node: int, jobs: Ints, modes: Ints, length: int, free: Floats
) -> float:
    """Energy of one row, its jobs started in order, each on the devices that :func:`schedule.times` takes.

    :param free: (most devices,) scratch: when devices become free, ascending.
    """
    kind, width = problem.types[node], problem.widths[node]
    for device in range(width):
        free[device] = problem.free[node, device]
    total = last = 0.0
    for at in range(length):
        job = jobs[at]
        wanted = problem.devices[kind, job, modes[at]]
        takes = problem.seconds[kind, job, modes[at]]
        starts = max(free[wanted - 1], problem.releases[job])
        ends = starts + takes
        # Of the devices that are free by the start, the last ``wanted`` are taken: those free before its end
        # move down, and its end is merged in.
        device = wanted
        while device < width and free[device] <= starts:
            device += 1
        while device < width and free[device] <= ends:
            free[device - wanted] = free[device]
            device += 1
        for place in range(device - wanted, device):
            free[place] = ends
        last = max(last, ends)
        if energy.name == _WEIGHTED_ENDS:
            total += problem.weights[job] * ends
        elif energy.name == _DEVICE_TIME:
            total += wanted * takes
    if energy.name == _ENDS:
        return float((last * energy.scale) ** _POWER)
    # The 1 is at once what a job costs: being late by a little must not pay.
    late = last / energy.deadline - 1
    return float(total * energy.scale + (energy.late * late + 1 if late > 0 else 0.0))


@compiled
def _mode_on(problem: Arrays, node: int, job: int, mode: int, seed: Words) -> int:
    """A mode on ``node``: ``mode`` in 55 % of cases, otherwise any at random; -1 where there is none."""
    count = problem.modes[problem.types[node], job]
    if count == 0:
        return -1
    if draw(seed) < 0.55:
        # By number: modes are ordered by width, so on another type it is about as wide.
        return int(min(mode, count - 1))
    return int(draw(seed) * count)


@compiled
def _copy(jobs: Ints, modes: Ints, length: int, to_jobs: Ints, to_modes: Ints) -> None:
    for at in range(length):
        to_jobs[at], to_modes[at] = jobs[at], modes[at]


@compiled
def _insert(jobs: Ints, modes: Ints, length: int, at: int, job: int, mode: int) -> None:
    for place in range(length, at, -1):
        jobs[place], modes[place] = jobs[place - 1], modes[place - 1]
    jobs[at], modes[at] = job, mode


@compiled
def _remove(jobs: Ints, modes: Ints, length: int, at: int) -> None:
    for place in range(at, length - 1):
        jobs[place], modes[place] = jobs[place + 1], modes[place + 1]


@compiled
def _make_moves(
    problem: Arrays,
    energy: Energy,
    state: AnnealingState,
    energies: Floats,
    best: AnnealingState,
    reached: Floats,
    temperature: float,
    moves: int,
    seed: Words,
) -> None:
    """Some moves at one temperature: they change ``state``, ``energies``, and ``best`` with ``reached``.

    With several nodes, 40 % exchange two jobs of two nodes, 20 % move a job to another node, 15 % change a
    job's mode, 10 % its mode and its place in the row, 15 % its place; with one node, 75 % change the mode.

    :param energies: (nodes,) of the rows of ``state``.
    :param reached: (1,) energy of ``best``.
    :param moves: how many to try.
    """
    nodes, room = state.jobs.shape
    here_jobs, here_modes = np.zeros(room, np.int64), np.zeros(room, np.int64)
    there_jobs, there_modes = np.zeros(room, np.int64), np.zeros(room, np.int64)
    free = np.zeros(_widest(problem))
    for _ in range(moves):
        one = int(draw(seed) * nodes)
        length = state.lengths[one]
        if length == 0:
            continue
        choice, at = draw(seed), int(draw(seed) * length)
        _copy(state.jobs[one], state.modes[one], length, here_jobs, here_modes)
        job, mode = here_jobs[at], here_modes[at]
        two, other_length = -1, 0
        there_energy = 0.0
        if nodes > 1 and choice < 0.6:
            two = int(draw(seed) * (nodes - 1))
            if two >= one:
                two += 1
            other_length = state.lengths[two]
            _copy(state.jobs[two], state.modes[two], other_length, there_jobs, there_modes)
            came = _mode_on(problem, two, job, mode, seed)
            if came < 0:
                continue
            if choice < 0.4 and other_length > 0:
                back_at = int(draw(seed) * other_length)
                back_job = there_jobs[back_at]
                back = _mode_on(problem, one, back_job, there_modes[back_at], seed)
                if back < 0:
                    continue
                here_jobs[at], here_modes[at] = back_job, back
                there_jobs[back_at], there_modes[back_at] = job, came
            else:
                _remove(here_jobs, here_modes, length, at)
                length -= 1
                _insert(
                    there_jobs, there_modes, other_length, int(draw(seed) * (other_length + 1)), job, came
                )
                other_length += 1
            there_energy = _row_energy(problem, energy, two, there_jobs, there_modes, other_length, free)
        else:
            if choice < 0.85:
                mode = int(draw(seed) * problem.modes[problem.types[one], job])
            to = at if choice < 0.75 else int(draw(seed) * length)
            _remove(here_jobs, here_modes, length, at)
            _insert(here_jobs, here_modes, length - 1, to, job, mode)
        here_energy = _row_energy(problem, energy, one, here_jobs, here_modes, length, free)
        # Metropolis's rule. (For the makespan, too, the energy of a move is the change of the rows' sum: at
        # the 40th power the longest rows are nearly all of it.)
        change = here_energy - energies[one]
        if two >= 0:
            change += there_energy - energies[two]
        if change > 0 and draw(seed) >= np.exp(-change / temperature):
            continue
        _copy(here_jobs, here_modes, length, state.jobs[one], state.modes[one])
        state.lengths[one], energies[one] = length, here_energy
        if two >= 0:
            _copy(there_jobs, there_modes, other_length, state.jobs[two], state.modes[two])
            state.lengths[two], energies[two] = other_length, there_energy
        if change < 0:
            now = _schedule_energy(energy, energies)
            if now < reached[0]:
                reached[0] = now
                for node in range(nodes):
                    length = state.lengths[node]
                    _copy(state.jobs[node], state.modes[node], length, best.jobs[node], best.modes[node])
                    best.lengths[node] = state.lengths[node]
