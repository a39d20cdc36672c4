"""Pyomo models, solved by HiGHS within the clock."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pyomo.environ as pyo
from pyomo.contrib.appsi.base import TerminationCondition
from pyomo.contrib.appsi.solvers.highs import Highs

from saturn_airflow.planning.clock import Clock


@dataclass(frozen=True)
class Outcome:
    """What HiGHS came back with.

    :param objective: of the best solution found, which the model's variables then hold; None without one.
    :param bound: no solution is better than this (minimising: a lower bound).
    """

    objective: float | None
    bound: float
    infeasible: bool
    optimal: bool


def solve(
    model: pyo.ConcreteModel,
    clock: Clock,
    *,
    warm: bool = False,
    target: float | None = None,
    gap: float = 0.0,
    relaxed: bool = False,
    seed: int = 0,
    **options: Any,
) -> Outcome:
    """Solve a minimisation model.

    :param warm: start from the values its variables hold.
    :param target: stop at a solution this good.
    :param relaxed: only the linear relaxation.
    """
    solver = Highs()
    solver.config.load_solution = False
    solver.config.time_limit = max(clock.left, 0.01)
    solver.config.warmstart = warm
    solver.config.mip_gap = gap
    solver.highs_options = {"threads": 1, "random_seed": seed, **options}
    if target is not None:
        solver.highs_options["objective_target"] = target
    if relaxed:
        solver.highs_options["solve_relaxation"] = True
    results = solver.solve(model)
    condition = results.termination_condition
    objective = results.best_feasible_objective
    if objective is not None and math.isfinite(objective):
        solver.load_vars()
    else:
        objective = None
    bound = results.best_objective_bound
    infeasible = condition in (TerminationCondition.infeasible, TerminationCondition.infeasibleOrUnbounded)
    optimal = condition == TerminationCondition.optimal
    if bound is None or (relaxed and not optimal):
        bound = -math.inf
    return Outcome(objective, bound, infeasible, optimal)
