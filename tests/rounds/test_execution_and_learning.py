"""Plans run on paper, what is learned from them, and when another is adopted."""

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from planning_problems import problems

from saturn_airflow.model.cluster import Node
from saturn_airflow.model.learning import SeenSpeed, corrected
from saturn_airflow.model.plan import Assignment, Place, Plan
from saturn_airflow.model.problem import Option, PlannedJob, Problem
from saturn_airflow.planning import solve
from saturn_airflow.planning.clock import LookClock
from saturn_airflow.planning.heuristics.foresight import foresee
from saturn_airflow.planning.instances.instance import group
from saturn_airflow.planning.instances.schedule import Placed, assignments
from saturn_airflow.planning.online.actual_seconds import truth, with_launches
from saturn_airflow.planning.online.adoption import Effort, decide
from saturn_airflow.planning.online.execution import Situation, execute, keep_places

QUICK = Effort(time_limit=0.02, repeatable=True)


def planned(problem: Any, seed: int = 0) -> Any:
    return solve(problem, time_limit=0.02, repeatable=True, seed=seed)


def everything(problem: Any) -> Any:
    return Situation({job.name: 1.0 for job in problem.jobs})


def assert_no_device_shared(stretches: Any) -> None:
    for one in stretches:
        for two in stretches:
            shared = set(one.place.device_ids) & set(two.place.device_ids)
            if one is not two and one.place.node == two.place.node and shared:
                assert one.end <= two.start + 1e-6 or two.end <= one.start + 1e-6


@settings(max_examples=40, deadline=None)
@given(problems(releases=False, busy=False))
def test_a_plan_runs_as_planned_when_jobs_take_what_they_should(problem: Any) -> None:
    plan = planned(problem)
    run = execute(problem, plan, everything(problem))
    assert run.end == pytest.approx(plan.makespan)
    assert not run.situation.left
    assert {s.job: s.end for s in run.stretches} == pytest.approx({a.job: a.end for a in plan.assignments})


@settings(max_examples=40, deadline=None)
@given(problems(releases=False, busy=False), st.integers(0, 99), st.floats(0.05, 0.95))
def test_progress_is_conserved_and_no_device_runs_two_jobs(problem: Any, seed: Any, share: Any) -> None:
    actual = truth(with_launches(problem, 0.2), 0.5, seed)
    plan = planned(problem)
    first = execute(actual, plan, everything(problem), until=plan.makespan * share)
    assume(first.situation.left)
    found = decide(with_launches(problem, 0.2), plan, first.situation, effort=QUICK, checkpoint=0.1)
    second = execute(actual, found.plan, first.situation, checkpoint=0.1)
    trained = dict.fromkeys((job.name for job in problem.jobs), 0.0)
    for stretch in (*first.stretches, *second.stretches):
        trained[stretch.job] += stretch.trained
    assert trained == pytest.approx(dict.fromkeys(trained, 1.0))
    assert_no_device_shared(first.stretches)
    assert_no_device_shared(second.stretches)


@settings(max_examples=40, deadline=None)
@given(problems(releases=False, busy=False), st.integers(0, 99), st.floats(0.05, 0.95))
def test_carrying_on_costs_nothing(problem: Any, seed: Any, share: Any) -> None:
    """A run that is looked at on the way ends when it would have."""
    actual = truth(with_launches(problem, 0.2), 0.5, seed)
    plan = planned(problem)
    whole = execute(actual, plan, everything(problem))
    first = execute(actual, plan, everything(problem), until=whole.end * share)
    second = execute(actual, plan, first.situation, checkpoint=0.1)
    assert not second.moved
    assert first.end + second.end == pytest.approx(whole.end)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(problems(releases=False, busy=False), st.integers(0, 99), st.floats(0.05, 0.95), st.floats(0, 2))
def test_a_plan_is_never_left_for_one_expected_to_end_later(
    problem: Any, seed: Any, share: Any, cost: Any
) -> None:
    actual = truth(with_launches(problem, 0.4), 0.5, seed)
    plan = planned(problem)
    now = execute(actual, plan, everything(problem), until=plan.makespan * share).situation
    assume(now.left)
    found = decide(actual, plan, now, effort=QUICK, checkpoint=cost)
    carried = execute(actual, plan, now, checkpoint=cost)
    again = execute(actual, found.plan, now, checkpoint=cost)
    assert again.end == pytest.approx(found.expected)
    assert again.end <= carried.end * (1 + 1e-9)
    if not found.adopted:
        assert found.moved == ()
        assert again.end == pytest.approx(carried.end)


@settings(max_examples=40, deadline=None)
@given(problems(releases=False))
def test_a_plan_around_others_runs_as_planned(problem: Any) -> None:
    """From when the devices are free of them, and not before."""
    found = decide(problem, None, everything(problem), effort=QUICK, checkpoint=0.0)
    run = execute(problem, found.plan, everything(problem))
    assert run.end == pytest.approx(found.plan.makespan)
    assert found.plan.makespan >= found.plan.lower_bound * (1 - 1e-9)
    free = {node.name: problem.free_of(node) for node in problem.nodes}
    for stretch in run.stretches:
        assert all(stretch.start >= free[stretch.place.node][d] for d in stretch.place.device_ids)


@settings(max_examples=40, deadline=None)
@given(problems(releases=False, busy=False), st.integers(0, 99), st.floats(0.05, 0.95))
def test_devices_are_kept_by_those_who_stay(problem: Any, seed: Any, share: Any) -> None:
    plan = planned(problem)
    run = execute(problem, plan, everything(problem), until=plan.makespan * share)
    assume(run.situation.left)
    found = keep_places(planned(problem, seed), problem, run.situation.running)
    for a in found.assignments:
        place = run.situation.running.get(a.job)
        if place and a.start == 0 and Place.of(a) == dataclasses.replace(place, device_ids=a.device_ids):
            assert a.device_ids == place.device_ids
    # Still valid: nothing waits longer for its devices than the plan says.
    assert execute(problem, found, everything(problem)).end <= found.makespan * (1 + 1e-9)


ONE_NODE = (Node("n", 2, "cpu"),)


def job(name: Any, *options: Any) -> Any:
    return PlannedJob(name, tuple(Option(t, g, {"cpu": s}, setup) for t, g, s, setup in options))


def test_a_move_pays_for_its_checkpoint_and_setting_up() -> None:
    problem = Problem("p", ONE_NODE, (job("a", ("one", 1, 100.0, 10.0), ("two", 2, 60.0, 10.0)),))
    plan = Plan("p", "makespan", 60, 0, 0, (Assignment("a", "two", 2, "n", (0, 1), 0, 60),))
    now = Situation({"a": 0.5}, {"a": Place("one", 1, "n", (0,))})
    run = execute(problem, plan, now, checkpoint=3.0)
    assert run.moved == ("a",)
    assert run.end == pytest.approx(3 + 10 + 0.5 * 50)


def test_moves_that_cost_more_than_they_win_are_not_made() -> None:
    problem = Problem("p", ONE_NODE, (job("a", ("one", 1, 100.0, 0.0), ("two", 2, 90.0, 0.0)),))
    plan = Plan("p", "makespan", 100, 0, 0, (Assignment("a", "one", 1, "n", (0,), 0, 100),))
    now = Situation({"a": 0.5}, {"a": Place("one", 1, "n", (0,))})
    assert decide(problem, plan, now, effort=QUICK, checkpoint=1.0).adopted
    stays = decide(problem, plan, now, effort=QUICK, checkpoint=10.0)
    assert not stays.adopted
    assert stays.expected == stays.otherwise == 50


def test_a_new_plan_leaves_a_job_on_the_devices_it_has() -> None:
    """The job runs on the device that the planner would give to another."""
    problem = Problem("p", ONE_NODE, (job("a", ("one", 1, 100.0, 1.0)), job("b", ("one", 1, 200.0, 1.0))))
    plan = Plan(
        "p",
        "makespan",
        300,
        0,
        0,
        (Assignment("a", "one", 1, "n", (1,), 0, 100), Assignment("b", "one", 1, "n", (1,), 100, 300)),
    )
    for name, device in (("a", 0), ("a", 1), ("b", 0), ("b", 1)):
        now = Situation({"a": 0.9, "b": 0.9}, {name: Place("one", 1, "n", (device,))})
        found = decide(problem, plan, now, effort=QUICK, checkpoint=5.0)
        assert found.adopted
        assert found.moved == ()


def test_jobs_of_a_lost_node_go_elsewhere() -> None:
    nodes = (Node("kept", 1, "cpu"), Node("lost", 1, "cpu"))
    problem = Problem("p", nodes[:1], (job("a", ("one", 1, 10.0, 0.0)), job("b", ("one", 1, 10.0, 0.0))))
    plan = Plan(
        "p",
        "makespan",
        10,
        0,
        0,
        (Assignment("a", "one", 1, "kept", (0,), 0, 10), Assignment("b", "one", 1, "lost", (0,), 0, 10)),
    )
    found = decide(problem, plan, Situation({"a": 1.0, "b": 1.0}), effort=QUICK, checkpoint=0.0)
    assert found.adopted
    assert math.isinf(found.otherwise)
    assert found.expected == pytest.approx(20)


def test_foresight_runs_thrifty_first_and_wide_after_the_boundary() -> None:
    """Three jobs on two devices: 16 seconds when none may change; 15, the least area, with a change."""
    options = (("one", 1, 10.0, 0.0), ("two", 2, 6.0, 0.0))
    problem = Problem("p", ONE_NODE, tuple(job(name, *options) for name in "abc"))
    effort = Effort(time_limit=0.3, repeatable=True)
    once = decide(problem, None, everything(problem), effort=effort, checkpoint=0.0)
    looked: dict[str, Any] = {"effort": effort, "checkpoint": 0.0, "length": lambda makespan: 5.0}
    ahead = decide(problem, None, everything(problem), **looked)
    assert once.expected == pytest.approx(16)
    assert ahead.expected == pytest.approx(15)
    behind = decide(problem, None, everything(problem), foresight=False, **looked)
    assert behind.expected == pytest.approx(16)


def test_foresight_leaves_less_for_after_the_boundary() -> None:
    """From three jobs one after another, wide: by second 5 the thrifty have done more."""
    options = (("one", 1, 10.0, 0.0), ("two", 2, 6.0, 0.0))
    problem = Problem("p", ONE_NODE, tuple(job(name, *options) for name in "abc"))
    instance = group(problem)
    wide = [[Placed(0, 1), Placed(1, 1), Placed(2, 1)]]

    def left_by(schedule: Any) -> Any:
        """Device-seconds, each job at its thriftiest."""
        plan = Plan("p", "makespan", 18, 0, 0, assignments(instance, schedule))
        return 10 * sum(execute(problem, plan, everything(problem), until=5.0).situation.left.values())

    assert left_by(wide) == pytest.approx(30 - 10 * 5 / 6)
    assert left_by(foresee(instance, wide, 5.0, 18.0, 0, LookClock(0.1))) == pytest.approx(20)


TWINS = Problem(
    "p",
    ONE_NODE,
    (
        job("a", ("one", 1, 100.0, 10.0), ("two", 2, 60.0, 10.0)),
        job("b", ("one", 1, 100.0, 10.0), ("two", 2, 60.0, 10.0)),
        job("c", ("one", 1, 50.0, 0.0)),
    ),
)


def factors(found: Any) -> Any:
    return {
        (j.name, o.technique): (o.seconds["cpu"] - o.setup) / (p.seconds["cpu"] - p.setup)
        for j, k in zip(found.jobs, TWINS.jobs, strict=True)
        for o, p in zip(j.options, k.options, strict=True)
    }


def test_a_speed_that_was_seen_corrects_the_jobs_others_and_its_twins() -> None:
    found = factors(corrected(TWINS, [SeenSpeed("a", "one", 1, "cpu", 2.0)]))
    assert found["a", "one"] == pytest.approx(2.0, rel=0.02)
    assert 1 < found["b", "two"] < found["b", "one"] < found["a", "two"] < 2
    assert found["c", "one"] == 1


def test_the_last_measurement_counts() -> None:
    found = factors(corrected(TWINS, [SeenSpeed("a", "one", 1, "cpu", f) for f in (5.0, 2.0)]))
    assert found["a", "one"] == pytest.approx(2.0, rel=0.02)


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(
        st.tuples(st.sampled_from("abc"), st.sampled_from([("one", 1), ("two", 2)])),
        st.floats(0.2, 5),
        max_size=5,
    )
)
def test_corrections_stay_within_what_was_seen(seen: Any) -> None:
    entries = [
        SeenSpeed(name, technique, devices, "cpu", factor)
        for (name, (technique, devices)), factor in seen.items()
    ]
    found = factors(corrected(TWINS, entries))
    for (name, strategy), factor in seen.items():
        if (name, strategy[0]) in found:
            assert found[name, strategy[0]] == pytest.approx(factor, rel=0.15)
    assert all(0.05 < factor < 20 for factor in found.values())


def test_learning_predicts_better_than_estimates_do() -> None:
    """Over many draws, the corrected seconds of what was not seen are nearer to the truth."""
    before = after = 0.0
    for seed in range(40):
        actual = truth(TWINS, 0.3, seed)
        true = factors(actual)
        guess = factors(corrected(TWINS, [SeenSpeed("a", "one", 1, "cpu", true["a", "one"])]))
        for key in (("a", "two"), ("b", "one"), ("b", "two")):
            before += math.log(true[key]) ** 2
            after += math.log(true[key] / guess[key]) ** 2
    assert after < 0.9 * before
