"""The one entry: from a problem to a plan, within a time limit."""

from __future__ import annotations

import math
from collections.abc import Callable

from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.plan import Plan
from saturn_airflow.model.problem import Problem
from saturn_airflow.planning import warming
from saturn_airflow.planning.clock import Clock, LookClock
from saturn_airflow.planning.incumbent import Incumbent, SolveProgress
from saturn_airflow.planning.instances.instance import group
from saturn_airflow.planning.instances.schedule import assignments, makespan
from saturn_airflow.planning.minimise import minimise_makespan, minimise_other
from saturn_airflow.planning.objectives import MAKESPAN, checked
from saturn_airflow.planning.online.replanning import carry_on

#: Share of the time limit that is kept for turning the schedule into a plan.
_FINISHING = 0.02


def solve(
    problem: Problem,
    *,
    objective: str = MAKESPAN,
    time_limit: float = 10.0,
    gap: float = 0.0,
    seed: int = 0,
    processes: int = 1,
    previous: Plan | None = None,
    on_progress: Callable[[SolveProgress], None] | None = None,
    deadline: float | None = None,
    started: float | None = None,
    repeatable: bool = False,
    all_wait: bool = False,
) -> Plan:
    """Plan ``problem``: stops at the time limit, at the asked gap, or when the plan is optimal.

    :param objective: ``"makespan"``, ``"mean-completion"`` or ``"device-time"``.
    :param time_limit: seconds, importing and building models included.
    :param gap: how far from optimal the plan may be, as a share (0.01: one per cent).
    :param processes: how many to search with; one is enough.
    :param previous: a plan whose strategies, nodes and order are to be carried on where nothing better is
        found; jobs it does not know are added, jobs that are gone are left out.
    :param on_progress: called with each better plan and each higher bound.
    :param deadline: seconds by which all must have ended, for ``"device-time"``.
    :param started: :func:`time.monotonic` of the moment the user began to wait.
    :param repeatable: count steps of the search, about as many as fit in the time limit, rather than time, so
        that the same problem and seed always give the same plan. The models of HiGHS, which count time, are
        left out: the lower bound is a weak one.
    :param all_wait: whether nothing runs until there is a plan. Planning for ``"makespan"`` then also stops
        when it has taken as long as any better plan could save: the makespan of the best less the bound.
    :raises InvalidSweepError: for an unknown objective, a time limit that is not above 0, a gap that is no
        share, or a deadline that is missing, misplaced or no time.
    :raises MissedDeadlineError: (an InvalidSweepError) when no plan meets the deadline, or none was found.
    """
    _check(time_limit, gap, processes)
    assert not (repeatable and processes > 1), "processes that exchange plans do so when they happen to"
    clock = LookClock(time_limit) if repeatable else Clock(time_limit * (1 - _FINISHING), started)
    aim = checked(objective, deadline)
    instance = group(problem)
    carried = None if previous is None else carry_on(instance, previous)
    if aim.name == MAKESPAN:
        best = Incumbent(instance, aim, clock, gap, on_progress, all_wait=all_wait)
        minimise_makespan(best, seed, processes, carried)
        bound = best.bound
    else:
        best, bound = minimise_other(instance, aim, clock, gap, seed, processes, carried, on_progress)
    warming.finish_aside()
    assigned = assignments(instance, best.schedule)
    end = makespan(instance, best.schedule)
    return Plan(
        name=problem.name,
        objective=objective,
        makespan=end,
        lower_bound=min(bound, end),
        seconds=clock.elapsed,
        assignments=assigned,
        value=None if aim.name == MAKESPAN else best.value,
        value_bound=None if aim.name == MAKESPAN else best.bound,
    )


def _check(time_limit: float, gap: float, processes: int) -> None:
    if not 0 < time_limit < math.inf:
        raise InvalidSweepError(f"the time limit is {time_limit!r}; give the seconds to plan for, above 0")
    if not 0 <= gap <= 1:
        raise InvalidSweepError(
            f"the gap is {gap!r}; give a share between 0 and 1, such as 0.01 for one per cent"
        )
    if processes < 1:
        raise InvalidSweepError(f"processes is {processes!r}; give at least 1")
