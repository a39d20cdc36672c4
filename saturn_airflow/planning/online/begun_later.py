"""Plans whose first jobs begin a while after the plan is made: they have to ask for their devices first."""

from __future__ import annotations

import dataclasses

from saturn_airflow.model.plan import Plan
from saturn_airflow.model.problem import Problem
from saturn_airflow.planning.objectives import MEAN_COMPLETION


def seen_from(problem: Problem, seconds: float) -> Problem:
    """``problem`` as it is seen so many seconds later: its devices are free that much earlier."""
    free = {node: tuple(max(0.0, at - seconds) for at in moments) for node, moments in problem.free.items()}
    return dataclasses.replace(problem, free=free)


def free_from(problem: Problem, seconds: float) -> Problem:
    """``problem`` where nothing begins for so many seconds."""
    if not seconds:
        return problem
    free = {node.name: tuple(max(seconds, at) for at in problem.free_of(node)) for node in problem.nodes}
    return dataclasses.replace(problem, free=free)


def begun_later(plan: Plan, seconds: float) -> Plan:
    """``plan`` and its bounds, with all of it so many seconds later."""
    later = tuple(
        dataclasses.replace(a, start=a.start + seconds, end=a.end + seconds) for a in plan.assignments
    )
    found = dataclasses.replace(
        plan,
        makespan=plan.makespan + seconds,
        lower_bound=plan.lower_bound + seconds,
        assignments=later,
    )
    if plan.objective != MEAN_COMPLETION or plan.value is None or plan.value_bound is None:
        return found
    return dataclasses.replace(found, value=plan.value + seconds, value_bound=plan.value_bound + seconds)
