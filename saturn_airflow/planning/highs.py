"""Pyomo models, solved by HiGHS within the clock."""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
from dataclasses import dataclass
from typing import Any

import pyomo.environ as pyo
from pyomo.common import dependencies
from pyomo.contrib.appsi.base import TerminationCondition
from pyomo.contrib.appsi.solvers.highs import Highs

from saturn_airflow.planning.clock import Clock


@dataclass(frozen=True)
class SolverResult:
    """What HiGHS came back with.

    :param objective: of the best solution found, which the model's variables then hold; None without one.
    :param bound: no solution is better than this (minimising: a lower bound); -inf where nothing is proven.
    :param infeasible: proven, by HiGHS's tolerances: there is no solution.
    :param optimal: ``objective`` is proven to be the optimum.
    """

    objective: float | None
    bound: float
    infeasible: bool
    optimal: bool


class Solver:
    """HiGHS for one model: solved again after rows were added, it goes on from where it was."""

    def __init__(self, model: pyo.ConcreteModel) -> None:
        _open_log()
        self.model = model
        self.highs = Highs()
        self.highs.config.load_solution = False
        # Its hundreds of lines would be in the log of the task that plans.
        self.highs.config.log_level = logging.DEBUG
        update = self.highs.update_config
        # Models here only gain rows.
        update.check_for_new_or_removed_params = False
        update.update_params = False
        update.update_named_expressions = False
        update.update_constraints = False

    def solve(
        self,
        clock: Clock,
        *,
        warm: bool = False,
        target: float | None = None,
        relaxed: bool = False,
        seed: int = 0,
        **options: Any,
    ) -> SolverResult:
        """Solve the model, a minimisation.

        :param warm: start from the values its variables hold.
        :param target: stop at a solution this good.
        :param relaxed: only the linear relaxation. Cut short by the clock it gives no bound: what the simplex
            method has before it is done is none.
        :param options: more options of HiGHS, by its own names.
        """
        solver = self.highs
        solver.config.time_limit = max(clock.left, 0.01)
        solver.config.warmstart = warm
        # By default HiGHS calls a solution optimal that is within 0.01 % of its bound.
        solver.config.mip_gap = 0.0
        solver.highs_options = {"threads": 1, "random_seed": seed, "solve_relaxation": relaxed, **options}
        if target is not None:
            solver.highs_options["objective_target"] = target
        results = solver.solve(self.model)
        condition = results.termination_condition
        objective = results.best_feasible_objective
        if objective is not None and math.isfinite(objective):
            solver.load_vars()
        else:
            objective = None
        bound = results.best_objective_bound
        infeasible = condition in (
            TerminationCondition.infeasible,
            TerminationCondition.infeasibleOrUnbounded,
        )
        optimal = condition == TerminationCondition.optimal
        if bound is None or (relaxed and not optimal):
            bound = -math.inf
        return SolverResult(objective, bound, infeasible, optimal)


def _open_log() -> None:
    """Have Pyomo log to where this process writes: to it, standard output is what it was at the import, which
    tasks that are forked later have closed, and Pyomo stops at a closed file."""
    for handler in logging.getLogger("pyomo").handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream.closed:
            handler.stream = sys.stdout  # setStream() would flush the closed one


def _own_lock() -> None:
    """Give this process a lock of its own for capturing what HiGHS prints: Pyomo has one for all processes
    that are forked from another, and a task that is killed while it holds it stops those that come later."""
    dependencies.capture_output_lock = threading.Lock()


os.register_at_fork(after_in_child=_own_lock)
