"""A solve as its user sees it: valid plans, progress, stopping, warm starts, many processes."""

import dataclasses
import itertools
import logging
import multiprocessing
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pyomo.environ as pyo
import pytest
from planning_problems import INSTANCES, assert_valid
from pyomo.common import dependencies, tee

from saturn_airflow.model.cluster import Node
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.plan import Plan
from saturn_airflow.model.problem import Option, PlannedJob, Problem
from saturn_airflow.planning import highs, solve
from saturn_airflow.planning.clock import Clock
from saturn_airflow.planning.incumbent import SolveProgress
from saturn_airflow.planning.presenting import baselines
from saturn_airflow.planning.presenting.explaining import explain

pytestmark = pytest.mark.slow

NAMES = sorted(path.stem for path in INSTANCES.glob("*.json"))


def read(name: str) -> Problem:
    return Problem.read(INSTANCES / f"{name}.json")


class Solved(NamedTuple):
    """A problem, its plan after two seconds, and what was told on the way."""

    problem: Problem
    plan: Plan
    seen: list[SolveProgress]


@pytest.fixture(scope="module")
def mix50() -> Solved:
    problem, seen = read("mix50-8x8"), list[SolveProgress]()
    return Solved(problem, solve(problem, time_limit=2.0, on_progress=seen.append), seen)


@pytest.mark.parametrize("name", NAMES)
def test_every_instance_in_a_second(name: str) -> None:
    problem = read(name)
    plan = solve(problem, time_limit=0.5)
    assert_valid(problem, plan)
    assert plan.lower_bound > 0
    assert plan.makespan <= baselines.current_practice(problem).makespan


@pytest.mark.parametrize(
    ("name", "shortest"), [("txt-2x8", 42604), ("txt-8-4-4", 42604), ("img-2x8", 44551), ("img-8-4-4", 44617)]
)
def test_paper_workloads_on_many_nodes_are_solved_to_optimality(name: str, shortest: float) -> None:
    plan = solve(read(name), time_limit=120.0)
    assert (plan.makespan, plan.lower_bound) == (shortest, shortest)


def test_progress_only_ever_gets_better(mix50: Solved) -> None:
    _, plan, seen = mix50
    assert len(seen) > 2
    for before, after in itertools.pairwise(seen):
        assert after.value <= before.value
        assert after.bound >= before.bound
    assert (seen[-1].value, seen[-1].bound) == (plan.makespan, plan.lower_bound)


def test_stops_at_the_asked_gap() -> None:
    seen: list[SolveProgress] = []
    plan = solve(read("mix50-8x8"), time_limit=60.0, gap=0.3, on_progress=seen.append)
    assert plan.gap <= 0.3
    assert all(progress.gap > 0.3 for progress in seen[:-1])


@pytest.mark.ranks
def test_processes_share_what_they_find() -> None:
    problem = read("mix50-8x8")
    assert_valid(problem, solve(problem, time_limit=2.0, processes=3))


def test_a_solve_survives_the_loss_of_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = read("mix50-8x8")
    for broken in ("/bin/false", "/nowhere/python"):
        monkeypatch.setattr(sys, "executable", broken)
        assert_valid(problem, solve(problem, time_limit=1.0, processes=2))


def test_a_plan_made_from_another_is_never_worse(mix50: Solved) -> None:
    problem, good, _ = mix50
    again = solve(problem, time_limit=0.05, previous=good)
    assert_valid(problem, again)
    assert again.makespan <= good.makespan


def test_a_previous_plan_is_carried_over_to_what_is_left(mix50: Solved) -> None:
    problem, previous, _ = mix50
    late = dataclasses.replace(problem.jobs[0], name="late")
    changed = dataclasses.replace(problem, nodes=problem.nodes[1:], jobs=(*problem.jobs[10:], late))
    plan = solve(changed, time_limit=0.5, previous=previous)
    assert_valid(changed, plan)


def test_where_all_wait_planning_takes_no_longer_than_it_can_save() -> None:
    rng = random.Random(2)
    jobs = [PlannedJob(f"j{n}", (Option("t", 1, {"cpu": rng.uniform(4, 12)}),)) for n in range(40)]
    problem = Problem("short", (Node("a", 4, "cpu"), Node("b", 4, "cpu")), tuple(jobs))
    plan = solve(problem, repeatable=True, all_wait=True)
    assert_valid(problem, plan)
    assert 0 < plan.makespan - plan.lower_bound <= plan.seconds < 2


def test_where_hours_may_be_saved_planning_takes_as_long_though_all_wait() -> None:
    problem = read("mix50-8x8")
    plans = [solve(problem, time_limit=0.5, repeatable=True, all_wait=wait) for wait in (True, False)]
    assert plans[0].assignments == plans[1].assignments
    assert plans[0].seconds >= 0.5


def test_priorities_and_releases() -> None:
    data = read("distinct12-1x8").to_dict()
    data["jobs"][3]["release"] = 50_000
    data["jobs"][5]["weight"] = 100.0
    problem = Problem.from_dict(data)
    plan = solve(problem, objective="mean-completion", time_limit=1.0)
    assert_valid(problem, plan)
    first = min(plan.assignments, key=lambda a: a.end)
    assert first.job == data["jobs"][5]["name"]


def test_devices_of_many_counts_and_a_large_node() -> None:
    rng = random.Random(1)
    jobs = []
    for j in range(60):
        base = rng.uniform(1e3, 1e5)
        widths = rng.sample(range(1, 50), 5)
        jobs.append(
            {
                "name": f"j{j}",
                "strategies": [
                    {"technique": "t", "devices": g, "seconds": {"a": base / g**0.8}} for g in sorted(widths)
                ],
            }
        )
    nodes = [{"name": "large", "devices": 50, "kind": "a"}, {"name": "odd", "devices": 7, "kind": "a"}]
    problem = Problem.from_dict({"name": "odd", "nodes": nodes, "jobs": jobs})
    assert_valid(problem, solve(problem, time_limit=1.0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"objective": "speed"}, "no objective 'speed'"),
        ({"objective": "device-time"}, "needs a deadline"),
        ({"objective": "device-time", "deadline": -1.0}, "deadline is -1.0"),
        ({"deadline": 10.0}, "goes with the objective device-time"),
        ({"time_limit": 0}, "time limit is 0"),
        ({"gap": -0.1}, "gap is -0.1"),
        ({"processes": 0}, "processes is 0"),
        ({"objective": "device-time", "deadline": 10.0}, "no plan can end by 10 s"),
    ],
)
def test_what_can_not_be_solved_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidSweepError, match=message):
        solve(read("txt-1x8"), **arguments)  # type: ignore[arg-type]


def test_explanations_name_what_was_given_up() -> None:
    problem = read("txt-2x8")
    plan = solve(problem, time_limit=60.0)
    explained = explain(problem, plan)
    assert [reason.assignment for reason in explained.reasons] == list(plan.assignments)
    assert all(reason.text for reason in explained.reasons)
    for reason in explained.reasons:
        # The plan is optimal: no single change makes it shorter.
        assert all(other.makespan >= plan.makespan for other in reason.alternatives)
    assert set(explained.utilisation) == {"node00", "node01"}
    assert 0.5 < explained.overall <= 1
    assert "job" in explained.bounded_by


def test_the_package_and_the_command_line_import_no_model() -> None:
    code = "import sys, saturn_airflow.cli as _; sys.exit(any(n in sys.modules for n in ('pyomo', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_highs_prints_is_in_no_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        solve(read("distinct20-2x8"), time_limit=1.0)
    assert caplog.messages == []


def test_a_process_with_another_standard_output_than_that_which_imported_pyomo_solves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As tasks do that a worker has forked after its imports."""
    with Path(os.devnull).open("w") as closed:
        pass
    for handler in logging.getLogger("pyomo").handlers:
        if isinstance(handler, logging.StreamHandler):
            monkeypatch.setattr(handler, "stream", closed)
    solve_a_small_model()


def test_a_process_solves_after_one_forked_from_the_same_was_killed_while_it_solved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left_locked = multiprocessing.Lock()
    left_locked.acquire()
    monkeypatch.setattr(dependencies, "capture_output_lock", left_locked)
    monkeypatch.setattr(tee, "_threading_deadlock", 1)
    task = multiprocessing.get_context("fork").Process(target=solve_a_small_model)
    task.start()
    task.join()
    assert task.exitcode == 0


def solve_a_small_model() -> None:
    model = pyo.ConcreteModel()
    model.x = pyo.Var(bounds=(1, 2))
    model.least = pyo.Objective(expr=model.x)
    assert highs.Solver(model).solve(Clock(10)).objective == 1
