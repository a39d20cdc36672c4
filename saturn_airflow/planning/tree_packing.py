"""L, the packing model: whole schedules from integer load balancing, without start times or big-M.

The devices of each node are divided, and the parts again, down to single devices: a binary tree of blocks,
one filled from the front of the schedule, another from its back. Variables: x_kB, jobs of class k on block
B, each under its fastest mode that fits the block, r_k(B) seconds; the makespan C.

    minimise C
    sum over B of x_kB = b_k                                        for every class k
    sum over the blocks B that hold d, and k, of r_k(B) x_kB <= C   for every device d of every node

A block's jobs follow each other. Front blocks start when the block they are part of is done, back blocks
end when the block they are part of begins, the whole ends at C: so device d is never in use twice, and the
rows above are all there is to keep. Shifting left makes up for what blocks leave idle.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pyomo.environ as pyo

from saturn_airflow.planning import highs
from saturn_airflow.planning.clock import Clock
from saturn_airflow.planning.instance import Instance
from saturn_airflow.planning.schedule import Placed, Schedule

_MOST_VARIABLES = 6000


@dataclass(frozen=True)
class Block:
    """Devices ``first`` to ``last`` - 1 of a node.

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


def blocks(instance: Instance, rng: random.Random) -> list[Block]:
    """Both trees of every node, parents before their parts. Halves, unless half is no whole number."""
    found: list[Block] = []
    for node, kind in enumerate(instance.type_of):
        widths = {m.devices for group in instance.classes for m in group.modes[kind]}
        buddies = all(w & (w - 1) == 0 for w in widths)
        for front in (True, False):
            waiting = [(0, instance.types[kind].devices, -1)]
            while waiting:
                first, last, parent = waiting.pop()
                found.append(Block(node, first, last, front, parent))
                if last - first > 1:
                    half = (last - first) // 2
                    cut = first + (half if buddies else rng.randint(1, last - first - 1))
                    here = len(found) - 1
                    waiting += [(first, cut, here), (cut, last, here)]
    return found


def pack(instance: Instance, clock: Clock, *, seed: int, below: float) -> Schedule | None:
    """The best schedule of random trees, if one that ends by ``below`` before shifting is found in time."""
    tree = blocks(instance, random.Random(seed))
    fastest: dict[tuple[int, int], tuple[float, int]] = {}
    for k, group in enumerate(instance.classes):
        for at, block in enumerate(tree):
            modes = group.modes[instance.type_of[block.node]]
            fitting = [
                (m.seconds, j) for j, m in enumerate(modes) if m.devices <= block.width and m.seconds < below
            ]
            if fitting:
                fastest[k, at] = min(fitting)
    if len(fastest) > _MOST_VARIABLES:
        return None
    m = model(instance, tree, fastest)
    m.makespan.setub(below)
    if highs.solve(m, clock, seed=seed).objective is None:
        return None
    counts = {key: round(m.x[key].value) for key in fastest}
    return _schedule(instance, tree, fastest, counts, m.makespan.value)


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
        m.placed.add(pyo.quicksum(own) == len(group.jobs) if own else pyo.Constraint.Infeasible)
    of_block: dict[int, list[tuple[int, int]]] = {}
    for key in fastest:
        of_block.setdefault(key[1], []).append(key)
    m.loads = pyo.ConstraintList()
    for node, kind in enumerate(instance.type_of):
        for device in range(instance.types[kind].devices):
            holding = [at for at, b in enumerate(tree) if b.node == node and b.first <= device < b.last]
            terms = [fastest[key][0] * m.x[key] for at in holding for key in of_block.get(at, ())]
            if terms:
                m.loads.add(pyo.quicksum(terms) <= m.makespan)
    return m


def _schedule(
    instance: Instance,
    tree: list[Block],
    fastest: dict[tuple[int, int], tuple[float, int]],
    counts: dict[tuple[int, int], int],
    end: float,
) -> Schedule:
    """The rows, in order of the starts that the trees give."""
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
