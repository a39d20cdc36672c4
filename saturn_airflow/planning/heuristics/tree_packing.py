"""L, the packing model: whole schedules from integer load balancing, without start times or big-M.

The devices of each node are divided, and the parts again, down to single devices: a binary tree of blocks,
one filled from the front of the schedule, another from its back. Variables: x_kB, jobs of class k on block
B, each under its fastest mode that fits the block, r_k(B) seconds; the makespan C.

    minimise C
    sum over B of x_kB = b_k                                        for every class k
    f_d + sum over the blocks B that hold d, and k, of r_k(B) x_kB <= C   for every device d of every node

A block's jobs follow each other. Front blocks start when the block they are part of is done, back blocks
end when the block they are part of begins, the whole ends at C: so device d is never in use twice, and the
rows above are all there is to keep. Shifting left makes up for what blocks leave idle. (Where a device is
free only from f_d on, a block of several begins when the last of them is free, which the rows leave out: the
schedule may end later than C then.)
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pyomo.environ as pyo

from saturn_airflow.planning import highs
from saturn_airflow.planning.clock import Clock
from saturn_airflow.planning.instances.instance import Instance
from saturn_airflow.planning.instances.schedule import Placed, Schedule

#: Larger models are not tried: HiGHS would hardly find a solution in a slice of time.
_MOST_VARIABLES = 6000


@dataclass(frozen=True)
class Block:
    """Devices ``first`` to ``last`` - 1 of a node.

    :param front: whether it is filled from the schedule's front, rather than from its back.
    :param parent: position of the block it is part of; -1 for the whole node.
    """

    node: int
    first: int
    last: int
    front: bool
    parent: int

    @property
    def width(self) -> int:
        """How many devices."""
        return self.last - self.first


class TreePacker:
    """Solves L again and again: with new random trees, or, where all widths are powers of two and so the
    trees always halves, going on from the solution before."""

    def __init__(self, instance: Instance, rng: random.Random) -> None:
        self.instance = instance
        self.rng = rng
        widths = {m.devices for group in instance.classes for modes in group.modes for m in modes}
        self.halves = all(width & (width - 1) == 0 for width in widths)
        self.counts: dict[tuple[int, int], int] = {}

    def pack(self, clock: Clock, *, below: float) -> Schedule | None:
        """The best schedule found in time that ends by ``below``, before it is shifted left.

        :returns: None where there is none, the model would be too large, or some job's modes all take longer.
        """
        instance = self.instance
        tree = blocks(instance, None if self.halves else self.rng)
        fastest: dict[tuple[int, int], tuple[float, int]] = {}
        for k, group in enumerate(instance.classes):
            for at, block in enumerate(tree):
                modes = group.modes[instance.type_of[block.node]]
                fitting = [
                    (m.seconds, j)
                    for j, m in enumerate(modes)
                    if m.devices <= block.width and m.seconds < below
                ]
                if fitting:
                    fastest[k, at] = min(fitting)
        if len(fastest) > _MOST_VARIABLES or len({k for k, _ in fastest}) < len(instance.classes):
            return None
        m = model(instance, tree, fastest)
        m.makespan.setub(below)
        warm = bool(self.counts) and self.halves
        if warm:
            for key in fastest:
                m.x[key].value = self.counts.get(key, 0)
        if highs.Solver(m).solve(clock, warm=warm, seed=self.rng.randrange(1 << 30)).objective is None:
            return None
        self.counts = {key: round(m.x[key].value) for key in fastest}
        return _schedule(instance, tree, fastest, self.counts, m.makespan.value)


def blocks(instance: Instance, rng: random.Random | None) -> list[Block]:
    """Both trees of every node, parents before their parts.

    :param rng: draws where to cut; None for halves.
    """
    found: list[Block] = []
    for node, kind in enumerate(instance.type_of):
        for front in (True, False):
            waiting = [(0, instance.types[kind].devices, -1)]
            while waiting:
                first, last, parent = waiting.pop()
                # A parent comes before its parts, which know it by its place in the list.
                found.append(Block(node, first, last, front, parent))
                if last - first > 1:
                    cut = (first + last) // 2 if rng is None else rng.randint(first + 1, last - 1)
                    here = len(found) - 1
                    waiting += [(first, cut, here), (cut, last, here)]
    return found


def model(
    instance: Instance, tree: list[Block], fastest: dict[tuple[int, int], tuple[float, int]]
) -> pyo.ConcreteModel:
    """L as a Pyomo model.

    :param fastest: seconds and mode of class k on block B, where any fits.
    """
    m = pyo.ConcreteModel()
    m.x = pyo.Var(list(fastest), domain=pyo.NonNegativeIntegers)
    m.makespan = pyo.Var(domain=pyo.NonNegativeReals)
    m.objective = pyo.Objective(expr=m.makespan)
    m.placed = pyo.ConstraintList()
    for k, group in enumerate(instance.classes):
        own = [m.x[key] for key in fastest if key[0] == k]
        m.placed.add(pyo.quicksum(own) == len(group.jobs))
    of_block: dict[int, list[tuple[int, int]]] = {}
    for key in fastest:
        of_block.setdefault(key[1], []).append(key)
    m.loads = pyo.ConstraintList()
    for node, kind in enumerate(instance.type_of):
        for device in range(instance.types[kind].devices):
            # All blocks over a device use it in turn, whatever their order: their seconds add up.
            holding = [at for at, b in enumerate(tree) if b.node == node and b.first <= device < b.last]
            terms = [fastest[key][0] * m.x[key] for at in holding for key in of_block.get(at, ())]
            if terms:
                m.loads.add(pyo.quicksum(terms) + instance.types[kind].free[device] <= m.makespan)
    return m


def _schedule(
    instance: Instance,
    tree: list[Block],
    fastest: dict[tuple[int, int], tuple[float, int]],
    counts: dict[tuple[int, int], int],
    end: float,
) -> Schedule:
    """The rows, in order of the starts that the trees give.

    :param counts: jobs of class k on block B, by (k, B).
    :param end: C, from which back blocks count.
    """
    waiting = [list(group.jobs) for group in instance.classes]
    reached = [0.0] * len(tree)
    starts: list[list[tuple[float, Placed]]] = [[] for _ in instance.type_of]
    for at, block in enumerate(tree):
        # Seconds from the front, or from the back, at which the block's jobs are done.
        now = reached[block.parent] if block.parent >= 0 else 0.0
        for k in range(len(instance.classes)):
            for _ in range(counts.get((k, at), 0)):
                seconds, mode = fastest[k, at]
                starts[block.node].append(
                    (now if block.front else end - now - seconds, Placed(waiting[k].pop(), mode))
                )
                now += seconds
        reached[at] = now
    return [[placed for _, placed in sorted(row)] for row in starts]
