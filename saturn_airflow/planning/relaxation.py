"""R, the relaxation: how many jobs of each class run in each mode, without saying when.

Variables: x_kim, jobs of class k in mode m = (g, r) on nodes of type i; the makespan C.

    minimise C
    sum over i, m of x_kim = b_k                            for every class k
    sum over k, m of u(g/G_i) r x_kim <= N_i C              for every type i and dual feasible u
    sum over m of r_m x_kim <= b_k C                        for every class k: no job outlasts C

Its optimum bounds the makespan from below, and so does that of its linear relaxation.
"""

from __future__ import annotations

import pyomo.environ as pyo

from saturn_airflow.planning import dual_feasible, highs
from saturn_airflow.planning.clock import Clock
from saturn_airflow.planning.instance import Instance


def simple_bound(instance: Instance) -> float:
    """The least that needs no model: the longest job at its fastest, and all least areas on all devices."""
    area = sum(len(group.jobs) * group.least_area for group in instance.classes)
    longest = max(group.release + group.shortest for group in instance.classes)
    return max(longest, area / instance.devices)


def model(instance: Instance) -> pyo.ConcreteModel:
    """R as a Pyomo model."""
    m = pyo.ConcreteModel()
    m.modes = pyo.Set(
        initialize=[
            (k, i, j)
            for k, group in enumerate(instance.classes)
            for i, modes in enumerate(group.modes)
            for j in range(len(modes))
        ]
    )
    m.x = pyo.Var(m.modes, domain=pyo.NonNegativeIntegers)
    m.makespan = pyo.Var(bounds=(simple_bound(instance), None))
    m.objective = pyo.Objective(expr=m.makespan)
    m.placed = pyo.ConstraintList()
    m.no_longer = pyo.ConstraintList()
    for k, group in enumerate(instance.classes):
        own = [(i, j) for i, modes in enumerate(group.modes) for j in range(len(modes))]
        m.placed.add(sum(m.x[k, i, j] for i, j in own) == len(group.jobs))
        m.no_longer.add(
            sum(group.modes[i][j].seconds * m.x[k, i, j] for i, j in own) <= len(group.jobs) * m.makespan
        )
    m.capacity = pyo.ConstraintList()
    for i, kind in enumerate(instance.types):
        on_type = [
            (k, j, mode) for k, group in enumerate(instance.classes) for j, mode in enumerate(group.modes[i])
        ]
        widths = {mode.devices / kind.devices for _, _, mode in on_type}
        for u in dual_feasible.family(widths):
            terms = [
                u(mode.devices / kind.devices) * mode.seconds * m.x[k, i, j]
                for k, j, mode in on_type
                if u(mode.devices / kind.devices) > 0
            ]
            if terms:
                m.capacity.add(sum(terms) <= len(kind.nodes) * m.makespan)
    return m


def bound(instance: Instance, clock: Clock, *, relaxed: bool) -> float:
    """A proven lower bound of the makespan.

    :param relaxed: of the linear relaxation only, which takes milliseconds.
    """
    outcome = highs.solve(model(instance), clock, relaxed=relaxed)
    return max(simple_bound(instance), outcome.bound)
