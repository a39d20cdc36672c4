"""R, the relaxation: how many jobs of each class run in each mode, without saying when.

Variables: x_kim, jobs of class k in mode m = (g, r) on nodes of type i; the makespan C.

    minimise C
    sum over i, m of x_kim = b_k                            for every class k
    sum over k released from s on, m of u(g/G_i) r x_kim <= N_i (C - s - B_isu)
                                                            for every type i, dual feasible u and moment s
    sum over m of (s_kim + r) x_kim <= b_k C                for every class k: no job outlasts C

A job starts at s_kim at the earliest, when it is released and g devices are free. The moments s are 0 and
releases: jobs that are released later have only the time from then on. B_isu is what devices of a node are
busy with from s until they are free, weighed by u, as far as it lies within a bound of C that is known.

Its optimum bounds the makespan from below, and so does that of its linear relaxation.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyomo.environ as pyo

from saturn_airflow.planning import highs
from saturn_airflow.planning.clock import Clock
from saturn_airflow.planning.instances.instance import Instance
from saturn_airflow.planning.lower_bounds import dual_feasible
from saturn_airflow.planning.lower_bounds.area import simple_bound


def model(instance: Instance) -> pyo.ConcreteModel:
    """R as a Pyomo model, with ``x`` by (class, type of node, number of the mode) and ``makespan``.

    Its unit of time is :func:`simple_bound`.
    """
    m = pyo.ConcreteModel()
    m.modes = pyo.Set(initialize=list(mode_keys(instance)), ordered=True)
    m.x = pyo.Var(m.modes, domain=pyo.NonNegativeIntegers)
    least = simple_bound(instance)
    m.makespan = pyo.Var(bounds=(1.0, None))
    m.objective = pyo.Objective(expr=m.makespan)
    m.placed = pyo.ConstraintList()
    m.no_longer = pyo.ConstraintList()
    for k, group in enumerate(instance.classes):
        own = [(i, j) for i, modes in enumerate(group.modes) for j in range(len(modes))]
        m.placed.add(pyo.quicksum(m.x[k, i, j] for i, j in own) == len(group.jobs))
        ends = pyo.quicksum(earliest_end(instance, k, i, j) / least * m.x[k, i, j] for i, j in own)
        m.no_longer.add(ends <= len(group.jobs) * m.makespan)
    m.capacity = pyo.ConstraintList()
    for i, kind in enumerate(instance.types):
        for since in (0.0, *instance.releases):
            keys = [key for key in m.modes if key[1] == i and earliest_end(instance, *key) > since]
            widths = {instance.classes[k].modes[i][j].devices / kind.devices for k, _, j in keys}
            for u in dual_feasible.family(widths):
                terms = []
                for k, _, j in keys:
                    mode = instance.classes[k].modes[i][j]
                    if (share := u(mode.devices / kind.devices)) > 0:
                        seconds = min(mode.seconds, earliest_end(instance, k, i, j) - since)
                        terms.append(share * seconds / least * m.x[k, i, j])
                if terms:
                    # Both descriptions of what is busy give a valid row; the one that says more is tighter.
                    busy = max(sum(u(width) * at for width, at in jobs) for jobs in kind.busy(least, since))
                    room = m.makespan - (since + busy) / least
                    m.capacity.add(pyo.quicksum(terms) <= len(kind.nodes) * room)
    return m


def earliest_end(instance: Instance, k: int, i: int, j: int) -> float:
    """The first moment at which a job of class k may end in its mode j on nodes of type i."""
    mode = instance.classes[k].modes[i][j]
    return max(instance.classes[k].release, instance.types[i].free[mode.devices - 1]) + mode.seconds


def mode_keys(instance: Instance) -> Iterator[tuple[int, int, int]]:
    """(k, i, m) for each mode m of class k on nodes of type i."""
    for k, group in enumerate(instance.classes):
        for i, modes in enumerate(group.modes):
            for j in range(len(modes)):
                yield k, i, j


def bound(instance: Instance, clock: Clock, *, relaxed: bool) -> float:
    """A proven lower bound of the makespan, in seconds; the area bound where R gives none in time.

    :param relaxed: of the linear relaxation only, which takes milliseconds.
    """
    outcome = highs.Solver(model(instance)).solve(clock, relaxed=relaxed)
    least = simple_bound(instance)
    return max(least, outcome.bound * least)
