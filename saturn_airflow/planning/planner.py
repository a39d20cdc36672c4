"""The one entry: from a problem to a plan."""

from __future__ import annotations

from collections.abc import Callable

from saturn_airflow.plan import Plan
from saturn_airflow.planning.clock import Clock
from saturn_airflow.planning.instance import group
from saturn_airflow.planning.listing import list_schedule
from saturn_airflow.planning.relaxation import bound, simple_bound
from saturn_airflow.planning.schedule import assignments
from saturn_airflow.problem import Problem

Progress = Callable[[float, float, float], None]


def solve(
    problem: Problem,
    *,
    objective: str = "makespan",
    time_limit: float = 10.0,
    gap: float = 0.0,
    seed: int = 0,
    processes: int = 1,
    previous: Plan | None = None,
    on_progress: Callable[..., None] | None = None,
) -> Plan:
    """Plan ``problem``."""
    clock = Clock(time_limit)
    instance = group(problem)
    schedule = list_schedule(instance, simple_bound(instance), clock)
    lower = bound(instance, clock, relaxed=False)
    assigned = assignments(instance, schedule)
    end = max(a.end for a in assigned)
    return Plan(problem.name, objective, end, min(end, lower), clock.elapsed, assigned)
