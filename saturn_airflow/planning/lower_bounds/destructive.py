"""The destructive bound: a makespan C is refuted by showing that the jobs can't share the nodes so long.

R(C) keeps the modes that end by C, and asks for the least overload t:

    minimise t
    sum over i, m of x_kim = b_k                                        for every class k
    sum over k, m of u(g/G_i) v(r/C) x_kim <= N_i + t                   for every type i and pair (u, v)

with u and v dual feasible functions of width and duration (see :mod:`dual_feasible`). What devices are busy
with until they are free counts as jobs whose place is fixed. With releases, there are the same rows for the
time from some moment s on: jobs take of it at least what they still take when they start as early as they
may, and v, which never falls, is of that over C - s. Where t > 0, even with fractions of jobs, no
plan ends by C. There are thousands of pairs, so rows are generated as they are needed: solve, find the pairs
that the solution violates most, add them, and solve again.

"Destructive" is the term of Klein and Scholl, "Computing lower bounds by destructive improvement" (1999).
"""

from __future__ import annotations

import math
from enum import Enum

import numpy as np
import numpy.typing as npt
import pyomo.environ as pyo

from saturn_airflow.planning import highs
from saturn_airflow.planning.clock import Clock
from saturn_airflow.planning.instances.instance import Instance
from saturn_airflow.planning.lower_bounds import dual_feasible
from saturn_airflow.planning.lower_bounds.relaxation import earliest_end, mode_keys

Key = tuple[int, int, int]

#: An overload above this is one; a row may be exceeded by as much. Above the solver's own tolerances.
_TOLERANCE = 5e-6
#: Rows that are added for each type of node between two solves, and how often that is done.
_ROWS_A_ROUND = 8
_ROUNDS = 40
#: Moments of release that have rows of their own, and thresholds of the functions there.
_MOST_WINDOWS, _WINDOW_THRESHOLDS = 6, 8
#: With more modes of classes on types than this, branch and bound over whole jobs is not tried.
_MOST_WHOLE = 2500


class Answer(Enum):
    """Whether a plan may end by C."""

    REFUTED = "no plan ends by C"
    POSSIBLE = "the relaxation has a solution"
    UNKNOWN = "the time was up"


class Refuter:
    """R(C) of one instance, for one C after another."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance

    def ask(self, end: float, clock: Clock, *, whole: bool) -> Answer:
        """Whether any plan may end by ``end``.

        :param whole: whole jobs, by branch and bound, instead of fractions.
        :returns: never REFUTED by mistake; POSSIBLE says only that this relaxation does not refute it.
        """
        instance = self.instance
        keys = _keys_by(instance, end)
        if len({k for k, _, _ in keys}) < len(instance.classes):
            return Answer.REFUTED
        m = _skeleton(instance, keys)
        pairs = _all_pairs(instance, keys, end)
        for each in pairs:
            each.add(m, each.identities())
        solver = highs.Solver(m)
        for _ in range(_ROUNDS):
            outcome = solver.solve(clock, relaxed=True)
            if outcome.bound > _TOLERANCE:
                return Answer.REFUTED
            if outcome.objective is None or clock.expired:
                return Answer.UNKNOWN
            x = np.array([m.x[key].value or 0.0 for key in keys])
            if not sum(each.add(m, each.violated(x)) for each in pairs):
                break
        if not whole:
            return Answer.POSSIBLE
        # Fractions of jobs don't refute it: now whole ones, with the rows that were found so far and, as long
        # as whole solutions violate some, with more.
        for variable in m.x.values():
            variable.domain = pyo.NonNegativeIntegers
        solver = highs.Solver(m)
        while not clock.expired:
            # Only the side of the tolerance on which the overload lies is asked for: HiGHS may stop at a
            # solution below it, and its dual simplex at an objective well above.
            outcome = solver.solve(clock, target=_TOLERANCE / 2, objective_bound=_TOLERANCE * 4)
            if outcome.bound > _TOLERANCE:
                return Answer.REFUTED
            if outcome.objective is None or outcome.objective > _TOLERANCE:
                return Answer.UNKNOWN
            x = np.array([round(m.x[key].value or 0.0) for key in keys], dtype=float)
            if not sum(each.add(m, each.violated(x)) for each in pairs):
                return Answer.POSSIBLE
        return Answer.UNKNOWN


def least_area(instance: Instance, end: float, clock: Clock) -> float | None:
    """Device-seconds that every plan takes at least which ends by ``end``; None where there is no such plan.

    R(C) with t = 0, and the area as what is minimised.
    """
    keys = _keys_by(instance, end)
    if len({k for k, _, _ in keys}) < len(instance.classes):
        return None
    m = _skeleton(instance, keys)
    m.overload.fix(0.0)
    # As a share of what there is, since the solver's tolerances are absolute.
    whole = instance.devices * end
    share = {(k, i, j): instance.classes[k].modes[i][j].area / whole for k, i, j in keys}
    m.objective.set_value(pyo.quicksum(share[key] * m.x[key] for key in keys))
    pairs = _all_pairs(instance, keys, end)
    for each in pairs:
        each.add(m, each.identities())
    least = sum(len(group.jobs) * group.least_area for group in instance.classes)
    solver = highs.Solver(m)
    for _ in range(_ROUNDS):
        outcome = solver.solve(clock, relaxed=True)
        if outcome.infeasible:
            return None
        if outcome.objective is None:
            break
        least = max(least, outcome.bound * whole)
        x = np.array([m.x[key].value or 0.0 for key in keys])
        if clock.expired or not sum(each.add(m, each.violated(x)) for each in pairs):
            break
    return least


def _keys_by(instance: Instance, end: float) -> list[Key]:
    """The modes that can end by ``end``: class, type of node and number of each."""
    return [key for key in mode_keys(instance) if earliest_end(instance, *key) <= end]


def _all_pairs(instance: Instance, keys: list[Key], end: float) -> list[_Pairs]:
    """The pairs for each type of node, from 0 and from some releases on."""
    later = [since for since in instance.releases if since < end]
    few = min(len(later), _MOST_WINDOWS)
    windows = [0.0, *(later[at * len(later) // few] for at in range(few))]
    return [_Pairs(instance, i, keys, end, since) for i in range(len(instance.types)) for since in windows]


def _skeleton(instance: Instance, keys: list[Key]) -> pyo.ConcreteModel:
    """R(C) without rows of pairs: ``x`` by key, ``overload`` (t), and ``shared``, the list for the rows."""
    m = pyo.ConcreteModel()
    m.x = pyo.Var(keys, domain=pyo.NonNegativeReals)
    m.overload = pyo.Var(domain=pyo.NonNegativeReals)
    m.objective = pyo.Objective(expr=m.overload)
    of_class: dict[int, list[Key]] = {}
    for key in keys:
        of_class.setdefault(key[0], []).append(key)
    m.placed = pyo.ConstraintList()
    for k, group in enumerate(instance.classes):
        m.placed.add(pyo.quicksum(m.x[key] for key in of_class[k]) == len(group.jobs))
    m.shared = pyo.ConstraintList()
    return m


class _Pairs:
    """The pairs (u, v) for one type of node, from the moment ``since`` to C.

    ``u`` and ``v`` are matrices (functions, modes of this type): each function of each mode's share of the
    devices and of that time.
    """

    def __init__(self, instance: Instance, kind: int, keys: list[Key], end: float, since: float) -> None:
        self.nodes = len(instance.types[kind].nodes)
        self.keys: list[Key] = []
        own: list[int] = []
        widths: list[float] = []
        lengths: list[float] = []
        for at, (k, i, j) in enumerate(keys):
            after = earliest_end(instance, k, i, j) - since
            if i == kind and after > 0:
                own.append(at)
                self.keys.append((k, i, j))
                mode = instance.classes[k].modes[i][j]
                widths.append(mode.devices / instance.types[kind].devices)
                # By rounding, what just ends by C may come to more than all of it.
                lengths.append(min(1.0, min(mode.seconds, after) / (end - since)))
        self.columns = np.array(own, dtype=int)
        before = [
            [(width, at / (end - since)) for width, at in jobs]
            for jobs in instance.types[kind].busy(end, since)
        ]
        thresholds = {} if since == 0 else {"thresholds": _WINDOW_THRESHOLDS}
        us = dual_feasible.family([*widths, *(w for jobs in before for w, _ in jobs)], **thresholds)
        vs = dual_feasible.family(
            [*lengths, *(length for jobs in before for _, length in jobs)], **thresholds
        )
        self.u, self.v = _values(us, widths), _values(vs, lengths)
        #: (functions u, functions v) what these nodes are busy with before their devices are free.
        self.taken = self.nodes * np.max(
            [
                _values(us, [width for width, _ in jobs]) @ _values(vs, [length for _, length in jobs]).T
                for jobs in before
            ],
            axis=0,
        )
        self.known: set[tuple[int, int]] = set()

    def identities(self) -> list[tuple[int, int]]:
        """Every u with v(x) = x: the first rows."""
        return [(at, 0) for at in range(len(self.u))] if len(self.columns) else []

    def violated(self, x: npt.NDArray[np.float64]) -> list[tuple[int, int]]:
        """The pairs that ``x`` violates most, a few of them; none where it keeps to all.

        :param x: (keys,) jobs under each mode.
        """
        if not len(self.columns):
            return []
        load = (self.u * x[self.columns]) @ self.v.T + self.taken
        worst = np.argsort(load, axis=None)[::-1][:_ROWS_A_ROUND]
        found = [(int(at) // load.shape[1], int(at) % load.shape[1]) for at in worst]
        return [
            pair for pair in found if load[pair] > self.nodes * (1 + _TOLERANCE) and pair not in self.known
        ]

    def add(self, m: pyo.ConcreteModel, pairs: list[tuple[int, int]]) -> int:
        """Add the rows of ``pairs`` to the model; returns how many."""
        for a, b in pairs:
            self.known.add((a, b))
            row = self.u[a] * self.v[b]
            terms = [float(value) * m.x[key] for key, value in zip(self.keys, row, strict=True) if value > 0]
            if terms:
                m.shared.add(pyo.quicksum(terms) <= self.nodes - float(self.taken[a, b]) + m.overload)
        return len(pairs)


def _values(functions: list[dual_feasible.Function], points: list[float]) -> npt.NDArray[np.float64]:
    """(functions, points)."""
    return np.array([[u(x) for x in points] for u in functions], dtype=float).reshape(
        len(functions), len(points)
    )


def bisect(
    instance: Instance, low: float, high: float, clock: Clock, *, steps: int, whole: bool = False
) -> float:
    """The largest C found in [low, high] that is refuted: a lower bound of the makespan. ``low`` if none is.

    :param low: a lower bound, in seconds.
    :param high: the makespan of a schedule.
    :param steps: values of C to try at most.
    :param whole: see :meth:`Refuter.ask`; not for large instances.
    """
    refuter = Refuter(instance)
    whole = whole and sum(1 for _ in mode_keys(instance)) <= _MOST_WHOLE
    for _ in range(steps):
        middle = (low + high) / 2
        if clock.expired or high <= low * (1 + 1e-4):
            break
        answer = refuter.ask(middle, clock, whole=whole)
        if answer is Answer.UNKNOWN:
            break
        if answer is Answer.REFUTED:
            low = middle
        else:
            # There may be no plan; but what does not refute this C hardly refutes a larger one.
            high = middle
    return low if math.isfinite(low) else 0.0
