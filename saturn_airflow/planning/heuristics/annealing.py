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
    """(last end / target)^40, and the mean of that over the ends of the row's devices.

    The longest rows count, all others hardly: one that is a tenth shorter counts 1.5 % of the longest. The
    mean tells rows of the same last end apart, by how much is left of the devices until then.
    """
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
    reached = np.array([_value(energy, energies)])
    seed = seeded(rng)
    while True:
        temperature = hot * (cold / hot) ** clock.gone
        if energy.name == _ENDS:
            # Scaled by the best makespan so far, the longest rows have an energy of about 1 all the way down:
            # else the 40th power would make it vanish as schedules get better.
            energy = makespan_energy(reached[0])
            _leave_out_late_modes(problem, state, reached[0])
            energies = _row_energies(problem, energy, state)
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
    :param firsts: (types, jobs) the first of them that is chosen.
    :param releases: (jobs,) seconds.
    :param weights: (jobs,)
    :param types: (nodes,) the type of each.
    :param widths: (nodes,) devices of each.
    :param free: (nodes, most devices) when devices become free, ascending.
    """

    devices: Ints
    seconds: Floats
    modes: Ints
    firsts: Ints
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
        np.zeros(seconds.shape[:2], dtype=np.int64),
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
def _power(share: float) -> float:
    """``share`` to the power of 40."""
    squared = share * share
    eighth = squared * squared * squared * squared
    return eighth * eighth * eighth * eighth * eighth


@compiled
def _value(energy: Energy, energies: Floats) -> float:
    """What is minimised: the makespan in seconds, otherwise the sum of the rows' energies."""
    last = total = 0.0
    for row in energies:
        last, total = max(last, row[1]), total + row[0]
    return last if energy.name == _ENDS else total


@compiled
def _widest(problem: Arrays) -> int:
    most = 0
    for width in problem.widths:
        most = max(most, width)
    return most


@compiled
def _row_energies(problem: Arrays, energy: Energy, state: AnnealingState) -> Floats:
    found = np.zeros((len(state.lengths), 2))
    free = np.zeros(_widest(problem))
    for node in range(len(found)):
        found[node, 0], found[node, 1] = _row_energy(
            problem, energy, node, state.jobs[node], state.modes[node], state.lengths[node], free
        )
    return found


@compiled
def _row_energy(
    problem: Arrays, energy: Energy, node: int, jobs: Ints, modes: Ints, length: int, free: Floats
) -> tuple[float, float]:
    """Energy of one row, and when its last job ends, in seconds.

    Its jobs are started in order, each on the devices that :func:`schedule.times` takes.

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
        for device in range(width):
            total += _power(free[device] * energy.scale)
        return _power(last * energy.scale) + total / width, last
    # The 1 is at once what a job costs: being late by a little must not pay.
    late = last / energy.deadline - 1
    return total * energy.scale + (energy.late * late + 1 if late > 0 else 0.0), last


@compiled
def _leave_out_late_modes(problem: Arrays, state: AnnealingState, makespan: float) -> None:
    """Choose no more, of each job's modes, the first that do not end before ``makespan``, alone on a node.

    No better schedule has them, and they are hard to leave by moves: until a wider mode has found its room,
    it makes a row longer, where these are just as long as the longest.
    """
    for kind in range(len(problem.firsts)):
        node = 0
        while problem.types[node] != kind:
            node += 1
        for job in range(len(problem.releases)):
            first = problem.firsts[kind, job]
            while first < problem.modes[kind, job]:
                free = problem.free[node, problem.devices[kind, job, first] - 1]
                if max(free, problem.releases[job]) + problem.seconds[kind, job, first] < makespan:
                    break
                first += 1
            problem.firsts[kind, job] = first
    for node in range(len(state.lengths)):
        kind = problem.types[node]
        for at in range(state.lengths[node]):
            job = state.jobs[node, at]
            first = min(problem.firsts[kind, job], problem.modes[kind, job] - 1)
            state.modes[node, at] = max(state.modes[node, at], first)


@compiled
def _mode_on(problem: Arrays, node: int, job: int, mode: int, seed: Words) -> int:
    """A mode on ``node``: ``mode`` in 55 % of cases, otherwise any at random; -1 where there is none."""
    kind = problem.types[node]
    first, count = problem.firsts[kind, job], problem.modes[kind, job]
    if first == count:
        return -1
    if draw(seed) < 0.55:
        # By number: modes are ordered by width, so on another type it is about as wide.
        return int(max(first, min(mode, count - 1)))
    return int(first + draw(seed) * (count - first))


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

    :param energies: (nodes, 2) of the rows of ``state``: energy, and seconds of the last end.
    :param reached: (1,) :func:`_value` of ``best``.
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
        there_energy = there_ends = 0.0
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
            there_energy, there_ends = _row_energy(
                problem, energy, two, there_jobs, there_modes, other_length, free
            )
        else:
            if choice < 0.85:
                kind = problem.types[one]
                first = min(problem.firsts[kind, job], problem.modes[kind, job] - 1)
                mode = int(first + draw(seed) * (problem.modes[kind, job] - first))
            to = at if choice < 0.75 else int(draw(seed) * length)
            _remove(here_jobs, here_modes, length, at)
            _insert(here_jobs, here_modes, length - 1, to, job, mode)
        here_energy, here_ends = _row_energy(problem, energy, one, here_jobs, here_modes, length, free)
        # Metropolis's rule. (For the makespan, too, the energy of a move is the change of the rows' sum: at
        # the 40th power the longest rows are nearly all of it.)
        change = here_energy - energies[one, 0]
        if two >= 0:
            change += there_energy - energies[two, 0]
        if change > 0 and draw(seed) >= np.exp(-change / temperature):
            continue
        _copy(here_jobs, here_modes, length, state.jobs[one], state.modes[one])
        state.lengths[one] = length
        energies[one, 0], energies[one, 1] = here_energy, here_ends
        if two >= 0:
            _copy(there_jobs, there_modes, other_length, state.jobs[two], state.modes[two])
            state.lengths[two] = other_length
            energies[two, 0], energies[two, 1] = there_energy, there_ends
        if change < 0:
            now = _value(energy, energies)
            if now < reached[0]:
                reached[0] = now
                for node in range(nodes):
                    length = state.lengths[node]
                    _copy(state.jobs[node], state.modes[node], length, best.jobs[node], best.modes[node])
                    best.lengths[node] = state.lengths[node]
