"""Fixed-makespan packing: fit all jobs on the nodes by C, with those that don't fit yet in a pool.

Every node always holds a set of jobs that :mod:`node_packing` has packed by C. A move exchanges up to two
jobs between a node and the pool, or between two nodes, and counts only when the sets it makes can be packed.
Measured in the largest node's capacity, the energy is

    least areas in the pool - L sum over nodes of capacity min(slack, 1/10)^2,

so that between equals the slack gathers in few nodes, where then one more job fits. Moves are taken by
simulated annealing at one low temperature; the cheap energy is judged before the costly packing. Sets that
could not be packed are remembered, and tried harder when they come up often. The pool and its ejections are
the idea of Nagata and Bräysy, "A powerful route minimization heuristic for the vehicle routing problem with
time windows" (2009).
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from saturn_airflow.planning.clock import Clock
from saturn_airflow.planning.compiled import compiled
from saturn_airflow.planning.exact_search.device_patterns import MOST_DEVICES, MOST_JOBS, REFUTED, share
from saturn_airflow.planning.exact_search.node_packing import FOUND, NONE, hash_keys, search
from saturn_airflow.planning.heuristics.pool_state import Memory, PoolState, Tables, Target
from saturn_airflow.planning.heuristics.xorshift import draw, seeded
from saturn_airflow.planning.instances.arrays import Floats, Ints, Words, free_by_node, modes_of
from saturn_airflow.planning.instances.instance import Instance
from saturn_airflow.planning.instances.schedule import Placed, Schedule, times

#: Of the annealing, in the largest node's capacity.
_TEMPERATURE = 0.002
#: The energy's factor L, and the slack, as a share of a node's capacity, from which on more is no better.
_GATHERING = 3.0
_ENOUGH_SLACK = 0.1
#: How often a set that was not settled has to come up before it is tried with more branches.
_ASKED_AGAIN = 8
#: Steps of :func:`share` for a set.
_SHARE_EFFORT = 2000
#: What is done between two looks at the clock, whichever is first.
_BRANCHES_AT_ONCE = 10_000
_MOVES_AT_ONCE = 1000
#: Entries of the two tables of :class:`Memory`.
_REMEMBERED_SETS, _REMEMBERED_BRANCHES = 1 << 16, 1 << 12
_REFUTED = -1


class PoolSearch:
    """The search for a schedule that ends by C, which may be changed on the way.

    :param schedule: where to start; nodes that end too late lose jobs to the pool.
    :param effort: branches to spend on packing a set of jobs when it first comes up.
    """

    def __init__(
        self, instance: Instance, schedule: Schedule, end: float, rng: random.Random, effort: int
    ) -> None:
        self.effort = effort
        self.instance = instance
        self.seed = seeded(rng)
        modes = [modes_of(instance, kind) for kind in range(len(instance.types))]
        most = max(own.seconds.shape[1] for own in modes)
        devices = np.ones((len(modes), len(instance.classes), most), dtype=np.int64)
        seconds = np.full(devices.shape, np.inf)
        # Types differ in how many modes they have; what one lacks takes for ever, so nothing chooses it.
        for kind, own in enumerate(modes):
            devices[kind, :, : own.devices.shape[1]] = own.devices
            seconds[kind, :, : own.seconds.shape[1]] = own.seconds
        longest = np.where(np.isfinite(seconds), seconds, 0.0).max(axis=2)
        keys = hash_keys(len(modes) * len(instance.classes)).reshape(len(modes), len(instance.classes), 2)
        self.tables = Tables(
            devices,
            seconds,
            # Sorted twice: the rank of each class by its longest mode.
            np.argsort(np.argsort(-longest, axis=1, kind="stable"), axis=1),
            modes[0].releases,
            np.array(instance.type_of),
            np.array([node.devices for node in instance.problem.nodes]),
            free_by_node(instance),
            keys,
        )
        jobs, nodes = len(instance.modes), len(schedule)
        self.state = PoolState(
            np.zeros((nodes, jobs + 2), np.int64),
            np.zeros((nodes, jobs + 2), np.int64),
            np.zeros(nodes, np.int64),
            np.zeros(nodes),
            np.zeros(jobs + 2, np.int64),
            np.zeros(1, np.int64),
        )
        for node, row in enumerate(schedule):
            self.state.lengths[node] = len(row)
            for at, (job, mode) in enumerate(row):
                self.state.classes[node, at] = instance.class_of[job]
                self.state.modes[node, at] = mode
        self.memory = Memory(
            np.zeros((_REMEMBERED_SETS, 2), np.uint64),
            np.zeros((_REMEMBERED_SETS, 2), np.int64),
            np.zeros((_REMEMBERED_BRANCHES, 2), np.uint64),
        )
        self.set_target(end)
        for node, row in enumerate(schedule):
            if any(run.end > end for run in times(instance, node, row)):
                _eject_until_packed(self.tables, self.target, self.state, self.memory, node, self.seed)

    def set_target(self, end: float) -> None:
        """Set C, at least what it was before. Keeps all that is packed, which ends by the old C."""
        # What could not be packed by the earlier C may be packed by this one.
        for part in self.memory:
            part[:] = 0
        modes = [modes_of(self.instance, kind) for kind in range(len(self.instance.types))]
        free = [np.array(kind.free) for kind in self.instance.types]
        areas = np.array([own.areas(end, at) for own, at in zip(modes, free, strict=True)])
        # Above 0 also where no device is free in time, to divide by.
        capacities: Floats = np.maximum(np.maximum(0.0, end - self.tables.free).sum(axis=1), end * 1e-9)
        largest = capacities.max()
        self.target = Target(end, areas, capacities, capacities / largest, areas.min(axis=0) / largest)
        _update_slacks(self.tables, self.target, self.state)

    def run(self, clock: Clock) -> Schedule | None:
        """Search until the pool is empty (the schedule then ends by C) or the time is up (None)."""
        # Jobs of some class end by C nowhere.
        if not np.isfinite(self.target.values).all():
            return None
        while self.state.pooled[0]:
            if clock.expired:
                return None
            _make_moves(self.tables, self.target, self.state, self.memory, self.effort, self.seed)
        return self.schedule()

    def schedule(self) -> Schedule:
        """The rows, with classes turned back into jobs."""
        waiting = [list(group.jobs) for group in self.instance.classes]
        state = self.state
        return [
            [
                Placed(waiting[k].pop(), int(mode))
                for k, mode in zip(own[:length], modes[:length], strict=True)
            ]
            for own, modes, length in zip(state.classes, state.modes, state.lengths, strict=True)
        ]


@compiled
def _slack(tables: Tables, target: Target, node: int, classes: Ints, count: int) -> float:
    """What a node's jobs leave of its capacity at least, as a share."""
    used = 0.0
    for at in range(count):
        used += target.areas[tables.kinds[node], classes[at]]
    return float(1 - used / target.capacities[node])


@compiled
def _update_slacks(tables: Tables, target: Target, state: PoolState) -> None:
    """Every node's slack anew, for a new C."""
    for node in range(len(state.lengths)):
        state.slacks[node] = _slack(tables, target, node, state.classes[node], state.lengths[node])


@compiled
def _pack(
    tables: Tables,
    target: Target,
    memory: Memory,
    node: int,
    classes: Ints,
    count: int,
    effort: int,
    path: Ints,
) -> tuple[bool, int]:
    """Whether ``count`` jobs of these classes were packed on the node, and the branches that took.

    :param classes: (at least count,) is sorted by rank.
    :param effort: branches, for a set that has not come up before.
    :param path: (2, jobs) class and mode of each in order of start, when they were.
    """
    kind = tables.kinds[node]
    ranks = tables.ranks[kind]
    # The hash is a sum over the jobs: their order does not matter. They are sorted by rank (insertion), so
    # that equal ones are next to each other.
    first, second, area = np.uint64(3), np.uint64(5), 0.0
    for at in range(count):
        k = classes[at]
        first, second = first + tables.keys[kind, k, 0], second + tables.keys[kind, k, 1]
        area += target.areas[kind, k]
        to = at
        while to > 0 and ranks[classes[to - 1]] > ranks[k]:
            classes[to] = classes[to - 1]
            to -= 1
        classes[to] = k
    allowance = target.capacities[node] * (1 + 1e-11) - area
    if not allowance >= 0:
        return False, 0
    slot = np.int64((first ^ (first >> np.uint64(31))) & np.uint64(_REMEMBERED_SETS - 1))
    known = memory.sets[slot, 0] == first and memory.sets[slot, 1] == second
    if known:
        # Not settled with so many branches: most sets fail again, so only what keeps coming up gets more.
        spent = memory.spent[slot, 0]
        if spent == _REFUTED:
            return False, 0
        memory.spent[slot, 1] += 1
        if memory.spent[slot, 1] <= _ASKED_AGAIN or spent >= _BRANCHES_AT_ONCE:
            return False, 0
        effort = min(spent * 4, _BRANCHES_AT_ONCE)
    width, end = tables.widths[node], target.end
    # Plain numbers would have the functions compiled once more, for just these numbers.
    share_effort: Any = np.int64(_SHARE_EFFORT)
    no_sharing: Any = np.int64(0)
    devices, seconds, areas = tables.devices[kind], tables.seconds[kind], target.areas[kind]
    status, branches = NONE, 1
    could = True
    if count <= MOST_JOBS and width <= MOST_DEVICES:
        capacities = np.zeros(width)
        for device in range(width):
            capacities[device] = max(0.0, end - tables.free[node, width - 1 - device])
        answer = share(capacities, devices, seconds, areas, classes, count, allowance, share_effort)
        could = answer != REFUTED
    if could:
        kinds, counts = np.zeros(count, np.int64), np.zeros(count, np.int64)
        present = _grouped(classes, count, kinds, counts)
        status, branches = search(
            tables.free[node, :width],
            end,
            devices,
            seconds,
            tables.releases,
            areas,
            kinds,
            counts,
            present,
            allowance,
            effort,
            no_sharing,
            tables.keys[kind],
            memory.branches,
            path,
        )
        if status == FOUND:
            return True, branches
    memory.sets[slot, 0], memory.sets[slot, 1] = first, second
    memory.spent[slot, 0] = _REFUTED if status == NONE else effort
    memory.spent[slot, 1] = 0
    return False, branches


@compiled
def _grouped(classes: Ints, count: int, kinds: Ints, counts: Ints) -> int:
    """How many different classes there are: each goes to ``kinds``, its number of jobs to ``counts``."""
    present = 0
    for at in range(count):
        if present > 0 and kinds[present - 1] == classes[at]:
            counts[present - 1] += 1
        else:
            kinds[present], counts[present] = classes[at], 1
            present += 1
    return present


@compiled
def _set_row(state: PoolState, node: int, path: Ints, count: int, slack: float) -> None:
    """Give a node the jobs of ``path``."""
    for at in range(count):
        state.classes[node, at], state.modes[node, at] = path[0, at], path[1, at]
    state.lengths[node], state.slacks[node] = count, slack


@compiled
def _eject_until_packed(
    tables: Tables, target: Target, state: PoolState, memory: Memory, node: int, seed: Words
) -> None:
    """Move jobs of a node to the pool, at random, until the others can be packed."""
    count = state.lengths[node]
    classes = state.classes[node].copy()
    path = np.zeros((2, count + 1), np.int64)
    while True:
        packed, _ = _pack(tables, target, memory, node, classes, count, _SHARE_EFFORT, path)
        if packed:
            break
        at = int(draw(seed) * count)
        state.pool[state.pooled[0]] = classes[at]
        state.pooled[0] += 1
        classes[at] = classes[count - 1]
        count -= 1
    slack = _slack(tables, target, node, path[0], count)
    _set_row(state, node, path, count, slack)


@compiled
def _is_accepted(change: float, seed: Words) -> bool:
    """Metropolis's rule: whether to take a move that changes the energy by ``change``."""
    return bool(change <= 0 or draw(seed) < np.exp(-change / _TEMPERATURE))


@compiled
def _slack_reward(target: Target, node: int, slack: float) -> float:
    """What a node's slack takes off the energy: squared, so that it pays to gather it in few nodes."""
    return float(_GATHERING * target.shares[node] * min(slack, _ENOUGH_SLACK) ** 2)


@compiled
def _copy(source: Ints, into: Ints, count: int) -> None:
    for at in range(count):
        into[at] = source[at]


@compiled
def _sample(classes: Ints, count: int, wanted: int, seed: Words) -> None:
    """Bring ``wanted`` of the ``count`` classes, drawn at random, to the front (Fisher-Yates, cut short)."""
    for at in range(wanted):
        other = at + int(draw(seed) * (count - at))
        classes[at], classes[other] = classes[other], classes[at]


@compiled
def _same(one: Ints, two: Ints, count: int) -> bool:
    """Whether the first ``count`` (one or two) are the same, in any order."""
    if count == 1:
        return bool(one[0] == two[0])
    return bool((one[0] == two[0] and one[1] == two[1]) or (one[0] == two[1] and one[1] == two[0]))


@compiled
def _exchanged(ours: Ints, count: int, out: int, theirs: Ints, into: int, new: Ints) -> int:
    """Write to ``new`` ours without the first ``out``, and the first ``into`` of theirs; returns how many."""
    for at in range(out, count):
        new[at - out] = ours[at]
    for at in range(into):
        new[count - out + at] = theirs[at]
    return count - out + into


@compiled
def _make_moves(
    tables: Tables, target: Target, state: PoolState, memory: Memory, effort: int, seed: Words
) -> None:
    """Try moves until enough were tried, enough branches were spent on packing, or the pool is empty.

    Half of the moves exchange up to two jobs of a node with one or two of the pool, the others up to two jobs
    of each of two nodes. ``out`` jobs leave the first node, ``into`` enter it.
    """
    nodes, room = state.classes.shape
    here, there = np.zeros(room, np.int64), np.zeros(room, np.int64)
    new_here, new_there = np.zeros(room, np.int64), np.zeros(room, np.int64)
    path_here, path_there = np.zeros((2, room), np.int64), np.zeros((2, room), np.int64)
    work = 0
    for _ in range(_MOVES_AT_ONCE):
        if work > _BRANCHES_AT_ONCE or state.pooled[0] == 0:
            return
        one = int(draw(seed) * nodes)
        count, kind = state.lengths[one], tables.kinds[one]
        _copy(state.classes[one], here, count)
        out = int(draw(seed) * 3)
        if out > count:
            continue
        change = 0.0
        if nodes == 1 or draw(seed) < 0.5:
            into, pooled = 1 if draw(seed) < 0.7 else 2, state.pooled[0]
            if into > pooled:
                continue
            _sample(here, count, out, seed)
            _sample(state.pool, pooled, into, seed)
            if out == into and _same(here, state.pool, out):
                continue
            slack = state.slacks[one]
            for at in range(out):
                slack += target.areas[kind, here[at]] / target.capacities[one]
                change += target.values[here[at]]
            for at in range(into):
                slack -= target.areas[kind, state.pool[at]] / target.capacities[one]
                change -= target.values[state.pool[at]]
            change += _slack_reward(target, one, state.slacks[one]) - _slack_reward(target, one, slack)
            # By energy first: packing costs far more.
            if not slack > 0 or not _is_accepted(change, seed):
                continue
            wanted = _exchanged(here, count, out, state.pool, into, new_here)
            packed, branches = _pack(tables, target, memory, one, new_here, wanted, effort, path_here)
            work += branches
            if not packed:
                continue
            _set_row(state, one, path_here, wanted, slack)
            # The jobs that entered leave the front of the pool; those that left are put at its end.
            for at in range(pooled - into):
                state.pool[at] = state.pool[at + into]
            for at in range(out):
                state.pool[pooled - into + at] = here[at]
            state.pooled[0] = pooled - into + out
            continue
        two = int(draw(seed) * (nodes - 1))
        if two >= one:
            two += 1
        other_count, other_kind = state.lengths[two], tables.kinds[two]
        _copy(state.classes[two], there, other_count)
        into = int(draw(seed) * 3)
        if into > other_count or into + out == 0:
            continue
        _sample(here, count, out, seed)
        _sample(there, other_count, into, seed)
        if out == into and _same(here, there, out):
            continue
        slack, other_slack = state.slacks[one], state.slacks[two]
        for at in range(out):
            slack += target.areas[kind, here[at]] / target.capacities[one]
            other_slack -= target.areas[other_kind, here[at]] / target.capacities[two]
        for at in range(into):
            slack -= target.areas[kind, there[at]] / target.capacities[one]
            other_slack += target.areas[other_kind, there[at]] / target.capacities[two]
        if not (slack > 0 and other_slack > 0):
            continue
        change = _slack_reward(target, one, state.slacks[one]) - _slack_reward(target, one, slack)
        change += _slack_reward(target, two, state.slacks[two]) - _slack_reward(target, two, other_slack)
        if not _is_accepted(change, seed):
            continue
        wanted = _exchanged(here, count, out, there, into, new_here)
        other_wanted = _exchanged(there, other_count, into, here, out, new_there)
        # The fuller one first: it is more likely to fail, which spares the other.
        fuller = slack <= other_slack
        packed = True
        for turn in range(2):
            if not packed:
                break
            if (turn == 0) == fuller:
                packed, branches = _pack(tables, target, memory, one, new_here, wanted, effort, path_here)
            else:
                packed, branches = _pack(
                    tables, target, memory, two, new_there, other_wanted, effort, path_there
                )
            work += branches
        if packed:
            _set_row(state, one, path_here, wanted, slack)
            _set_row(state, two, path_there, other_wanted, other_slack)
