"""The MILP of the Saturn paper, as written there, to compare with: start times and big-M.

Source: Nagrecha and Kumar, "Saturn: An Optimized Data System for Multi-Large-Model Deep Learning
Workloads", VLDB 2024, section 4. Variables: B_ts, job t runs under strategy s; O_tn, on node n; P_tnd, on
device d of it; I_t, its start; A_tu, job t before job u; the makespan C. With M = 1e10,

    minimise C
    C >= I_t + sum over s of r_ts B_ts                                        for every job t
    sum over s of B_ts = 1,  sum over n of O_tn = 1                           for every job t
    sum over d of P_tnd = sum over s of g_s B_ts, unless O_tn = 0             for every job t, node n
    I_u >= I_t + sum over s of r_ts B_ts, unless A_tu = 0 or they share no device
    I_t >= I_u + sum over s of r_us B_us, unless A_tu = 1 or they share no device

It finds little: the relaxation of the last two rows says nothing, and M times the solver's tolerance is
hours. What it returns is put in the order of its starts and shifted left, which mends overlaps.
"""

from __future__ import annotations

import itertools

import pyomo.environ as pyo

from saturn_airflow.planning import highs
from saturn_airflow.planning.clock import Clock
from saturn_airflow.planning.instances.instance import Instance
from saturn_airflow.planning.instances.schedule import Placed, Schedule

#: The paper's "large number" (seconds), above any makespan.
_BIG = 1e10
#: Larger problems are not tried: the variables are as many as pairs of jobs times devices.
MOST_JOBS = 16
MOST_DEVICES = 16


def schedule(instance: Instance, clock: Clock) -> Schedule | None:
    """The best schedule found in time; None when there is none, or the problem is too large to try.

    There is none, too, where HiGHS takes the model for infeasible, which M can bring about.
    """
    jobs, nodes = range(len(instance.problem.jobs)), range(len(instance.problem.nodes))
    if len(jobs) > MOST_JOBS or instance.devices > MOST_DEVICES:
        return None
    m = model(instance)
    if highs.Solver(m).solve(clock).objective is None:
        return None
    starts: list[list[tuple[float, Placed]]] = [[] for _ in nodes]
    for t in jobs:
        node, mode = next((n, s) for t_, n, s in m.B if t_ == t and m.B[t, n, s].value > 0.5)
        starts[node].append((m.I[t].value, Placed(t, mode)))
    return [[placed for _, placed in sorted(row)] for row in starts]


def model(instance: Instance) -> pyo.ConcreteModel:
    """The paper's model; B also says on which node, for nodes whose modes differ."""
    jobs, nodes = range(len(instance.problem.jobs)), range(len(instance.problem.nodes))
    kinds = instance.type_of
    devices = [(n, d) for n in nodes for d in range(instance.types[kinds[n]].devices)]
    choices = [(t, n, s) for t in jobs for n in nodes for s in range(len(instance.modes[t][kinds[n]]))]
    mode = {(t, n, s): instance.modes[t][kinds[n]][s] for t, n, s in choices}
    of_job = {t: [key for key in choices if key[0] == t] for t in jobs}
    m = pyo.ConcreteModel()
    m.B = pyo.Var(choices, domain=pyo.Binary)
    m.O = pyo.Var(jobs, nodes, domain=pyo.Binary)
    m.P = pyo.Var(jobs, devices, domain=pyo.Binary)
    m.I = pyo.Var(jobs, domain=pyo.NonNegativeReals)
    m.A = pyo.Var(list(itertools.combinations(jobs, 2)), domain=pyo.Binary)
    m.makespan = pyo.Var(domain=pyo.NonNegativeReals)
    m.objective = pyo.Objective(expr=m.makespan)
    m.rows = pyo.ConstraintList()
    seconds = {t: pyo.quicksum(mode[key].seconds * m.B[key] for key in of_job[t]) for t in jobs}
    for t in jobs:
        m.rows.add(m.makespan >= m.I[t] + seconds[t])
        m.rows.add(pyo.quicksum(m.B[key] for key in of_job[t]) == 1)
        for n in nodes:
            own = [key for key in of_job[t] if key[1] == n]
            m.rows.add(m.O[t, n] == (pyo.quicksum(m.B[key] for key in own) if own else 0))
            wanted = pyo.quicksum(mode[key].devices * m.B[key] for key in own)
            m.rows.add(pyo.quicksum(m.P[t, n_, d] for n_, d in devices if n_ == n) == wanted)
    for t, u in m.A:
        for n, d in devices:
            # Two jobs on one device go one after the other; where they share none, M switches both rows off.
            apart = 2 - m.P[t, n, d] - m.P[u, n, d]
            m.rows.add(m.I[u] >= m.I[t] + seconds[t] - _BIG * (apart + 1 - m.A[t, u]))
            m.rows.add(m.I[t] >= m.I[u] + seconds[u] - _BIG * (apart + m.A[t, u]))
    return m
