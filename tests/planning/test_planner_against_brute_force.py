"""Small problems against every schedule there is: plans are valid, bounds hold, and small means optimal."""

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from planning_problems import (
    assert_valid,
    device_time_by,
    makespan,
    mean_completion,
    optimum,
    problems,
)

from saturn_airflow.model.cluster import Node
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.problem import Option, PlannedJob, Problem
from saturn_airflow.planning import solve
from saturn_airflow.planning.clock import Clock
from saturn_airflow.planning.instances.instance import group
from saturn_airflow.planning.lower_bounds.area import mean_completion_bound, simple_bound
from saturn_airflow.planning.lower_bounds.destructive import Answer, Refuter, bisect, least_area
from saturn_airflow.planning.lower_bounds.relaxation import bound
from saturn_airflow.planning.presenting import baselines

pytestmark = pytest.mark.slow

CLOSE = 1 + 1e-6
slow = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
quick = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


@slow
@given(problems())
def test_makespan_of_small_problems_is_optimal_and_proven(problem: Problem) -> None:
    plan = solve(problem, time_limit=120.0)
    assert_valid(problem, plan)
    best = optimum(problem, makespan)
    assert plan.makespan == pytest.approx(best, rel=1e-6)
    assert plan.lower_bound <= best * CLOSE
    assert plan.gap < 1e-6


@slow
@given(problems(most_jobs=3))
def test_mean_completion_is_between_its_bound_and_what_was_found(problem: Problem) -> None:
    plan = solve(problem, objective="mean-completion", time_limit=0.3)
    assert_valid(problem, plan)
    best = optimum(problem, mean_completion)
    assert plan.value is not None
    assert plan.value_bound is not None
    assert plan.value_bound <= best * CLOSE
    assert best <= plan.value * CLOSE
    assert plan.value <= best * 1.02


@slow
@given(problems(most_jobs=3), st.floats(0.5, 2.0))
def test_device_time_keeps_the_deadline(problem: Problem, share: float) -> None:
    shortest = optimum(problem, makespan)
    deadline = shortest * share
    # A deadline that is the optimum to the last digit may be refused or met.
    assume(abs(share - 1) > 1e-3)
    if share < 1:
        with pytest.raises(InvalidSweepError, match=r"ends? by"):
            solve(problem, objective="device-time", deadline=deadline, time_limit=0.5)
        return
    plan = solve(problem, objective="device-time", deadline=deadline, time_limit=0.6)
    assert_valid(problem, plan)
    assert plan.makespan <= deadline * CLOSE
    best = optimum(problem, device_time_by(deadline))
    assert plan.value is not None
    assert plan.value_bound is not None
    assert plan.value_bound <= best * CLOSE
    assert best <= plan.value * CLOSE


@quick
@given(problems())
def test_every_bound_is_below_every_optimum(problem: Problem) -> None:
    instance = group(problem)
    shortest = optimum(problem, makespan)
    assert simple_bound(instance) <= shortest * CLOSE
    assert bound(instance, Clock(10), relaxed=True) <= shortest * CLOSE
    assert bound(instance, Clock(10), relaxed=False) <= shortest * CLOSE
    assert mean_completion_bound(instance) <= optimum(problem, mean_completion) * CLOSE


def test_what_is_released_late_has_only_the_time_after_it() -> None:
    late = [PlannedJob(f"late-{n}", (Option("single", 1, {"cpu": 50}),), release=100) for n in range(3)]
    early = PlannedJob("early", (Option("single", 1, {"cpu": 10}),))
    problem = Problem("x", (Node("a", 1, "cpu"),), (early, *late))
    assert bound(group(problem), Clock(10), relaxed=True) == pytest.approx(250)


def test_what_starts_early_takes_some_of_the_time_after_a_release_too() -> None:
    early = PlannedJob("early", (Option("single", 1, {"cpu": 10}),))
    late = PlannedJob("late", (Option("double", 2, {"cpu": 6}),), release=5)
    instance = group(Problem("x", (Node("a", 2, "cpu"),), (early, late)))
    # From 5 on there are 5 of the early job's seconds on one device and 6 of the late one's on both.
    assert bound(instance, Clock(10), relaxed=True) == pytest.approx(5 + (5 + 12) / 2)
    # The late job has more than half of the time until 15, and then nothing else has all of its devices.
    assert bisect(instance, 13.5, 16, Clock(10), steps=10) > 15


@pytest.mark.parametrize("unit", [1e-9, 1e9])
def test_bounds_do_not_depend_on_the_unit_of_time(unit: float) -> None:
    wide = (Option("t2", 2, {"a": 8 * unit, "b": 3 * unit}), Option("t4", 4, {"a": 4 * unit, "b": 5 * unit}))
    jobs = [PlannedJob(f"wide-{n}", wide) for n in range(3)]
    narrow = PlannedJob("narrow", (Option("t1", 1, {"a": unit, "b": 3 * unit}),), ("n2",))
    nodes = (Node("n0", 2, "b"), Node("n1", 4, "a"), Node("n2", 1, "a"))
    instance = group(Problem("x", nodes, (*jobs, narrow), {"n2": (unit,)}))
    assert bound(instance, Clock(10), relaxed=False) == pytest.approx(6 * unit)


@quick
@given(problems(), st.floats(1.0, 1.5), st.booleans())
def test_a_makespan_that_is_possible_is_never_refuted(problem: Problem, share: float, whole: bool) -> None:
    instance = group(problem)
    end = optimum(problem, makespan) * share * (1 + 1e-9)
    assert Refuter(instance).ask(end, Clock(10), whole=whole) is not Answer.REFUTED
    least = least_area(instance, end, Clock(10))
    assert least is not None
    assert least <= optimum(problem, device_time_by(end)) * CLOSE


@quick
@given(problems())
def test_a_makespan_below_the_longest_job_is_refuted(problem: Problem) -> None:
    instance = group(problem)
    longest = max(each.earliest_end for each in instance.classes)
    assert Refuter(instance).ask(longest * 0.99, Clock(10), whole=False) is Answer.REFUTED


@slow
@given(problems(most_jobs=3))
def test_baselines_are_plans_and_never_beat_the_optimum(problem: Problem) -> None:
    shortest = optimum(problem, makespan)
    made = [baselines.current_practice(problem), baselines.one_device(problem), baselines.listed(problem)]
    # With its M of 1e10, HiGHS takes the paper's model of some problems for infeasible.
    paper = baselines.upstream(problem, 5.0)
    for plan in [*made, *([paper] if paper is not None else [])]:
        assert_valid(problem, plan)
        assert shortest <= plan.makespan * CLOSE


def test_the_papers_model_finds_plans() -> None:
    option = Option("t", 1, {"a": 2.0}, 0.0)
    problem = Problem("p", (Node("n", 2, kind="a"),), tuple(PlannedJob(n, (option,)) for n in "abc"))
    plan = baselines.upstream(problem, 5.0)
    assert plan is not None
    assert plan.makespan == pytest.approx(4.0)
