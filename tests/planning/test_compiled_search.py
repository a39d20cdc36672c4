"""The compiled parts: what they refute can't be done, what they find can, and they repeat themselves."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planning_problems import INSTANCES, makespan, optimum, problems

from saturn_airflow.model.cluster import Node
from saturn_airflow.model.problem import Option, PlannedJob, Problem
from saturn_airflow.planning.clock import Clock, LookClock
from saturn_airflow.planning.exact_search.node_packing import NotSettledError, Packer, Sharer
from saturn_airflow.planning.exact_search.sharings import Attempt
from saturn_airflow.planning.heuristics import annealing
from saturn_airflow.planning.heuristics.ejection_pool import PoolSearch
from saturn_airflow.planning.heuristics.list_scheduling import list_schedule
from saturn_airflow.planning.heuristics.xorshift import draw, seeded
from saturn_airflow.planning.instances.arrays import Ints, merged, modes_of
from saturn_airflow.planning.instances.instance import Instance, group
from saturn_airflow.planning.instances.schedule import makespan as ends_at
from saturn_airflow.planning.lower_bounds.area import simple_bound

pytestmark = pytest.mark.slow

many = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def everything(instance: Instance) -> tuple[tuple[int, ...], Ints]:
    """All jobs as classes, and as one set of counts."""
    counts = np.array([[len(each.jobs) for each in instance.classes]])
    return tuple(sorted(instance.class_of)), counts


@many
@given(problems(most_jobs=4), st.floats(0.7, 1.3))
def test_one_node_is_packed_exactly_where_it_can_be(problem: Problem, share: float) -> None:
    home = problem.nodes[0]
    jobs = tuple(job for job in problem.jobs if any(problem.fits(job, o, home) for o in job.options))
    if not jobs:
        return
    free = {home.name: problem.free_of(home)}
    alone = Problem("alone", (home,), tuple(only_on(job, home) for job in jobs), free)
    instance = group(alone)
    shortest = optimum(alone, makespan)
    end = shortest * (share if abs(share - 1) > 1e-3 else 1.001)
    classes, counts = everything(instance)
    packer = Packer(instance, 0, end)
    row = packer.search(classes, 10**6)
    assert (row is not None) == (end > shortest)
    if row is not None:
        assert packer.shareable(counts)[0]
        assert sorted(k for k, _ in row) == list(classes)


def only_on(job: PlannedJob, node: Node) -> PlannedJob:
    options = [
        Option(o.technique, o.devices, {node.kind: o.seconds[node.kind]})
        for o in job.options
        if node.kind in o.seconds
    ]
    return PlannedJob(job.name, tuple(options), None, job.release, job.weight)


@many
@given(problems(most_jobs=4), st.floats(1.0, 1.2))
def test_devices_of_all_nodes_together_can_share_what_a_plan_does(problem: Problem, share: float) -> None:
    instance = group(problem)
    end = optimum(problem, makespan) * share * (1 + 1e-9)
    tables = [modes_of(instance, kind) for kind in range(len(instance.types))]
    _, counts = everything(instance)
    free = np.sort([at for node in problem.nodes for at in problem.free_of(node)])
    together = Sharer(free, merged(tables), end)
    assert together.shareable(counts)[0]


def test_devices_refute_what_area_does_not() -> None:
    """Three jobs of 4 s on two devices: area allows 6 s, but one device has two of them."""
    problem = Problem.from_dict(
        {
            "nodes": [{"name": "n", "devices": 2, "kind": "a"}],
            "jobs": [
                {"name": f"j{n}", "strategies": [{"technique": "t", "devices": 1, "seconds": {"a": 4}}]}
                for n in range(3)
            ],
        }
    )
    instance = group(problem)
    _, counts = everything(instance)
    packer = Packer(instance, 0, 7.9)
    assert packer.allowances(counts)[0] > 0
    assert not packer.shareable(counts)[0]
    assert Packer(instance, 0, 8.0).shareable(counts)[0]


def test_an_attempt_that_was_cut_short_goes_on() -> None:
    instance = group(Problem.read(INSTANCES / "txt-2x8.json"))
    attempt = Attempt(instance, 42603.5)
    cuts = 0
    while True:
        try:
            found = attempt.run(LookClock(0.001))
        except NotSettledError:
            cuts += 1
            continue
        break
    assert found is None
    assert cuts > 0


def test_the_same_seed_searches_the_same() -> None:
    instance = group(Problem.read(INSTANCES / "mix30-100gpus.json"))
    listed = list_schedule(instance, 0.0, LookClock(1))
    end = ends_at(instance, listed)
    energy = annealing.makespan_energy(end)
    found = [
        annealing.anneal(instance, listed, energy, random.Random(5), LookClock(0.02), hot=1.0, cold=0.01)
        for _ in range(2)
    ]
    assert found[0] == found[1]
    packed = [
        PoolSearch(instance, listed, end * 0.99, random.Random(5), 100).run(LookClock(0.1)) for _ in range(2)
    ]
    assert packed[0] == packed[1]


@pytest.mark.parametrize("clock", [Clock(0.0), LookClock(0.0)])
def test_a_search_without_any_time_makes_nothing_worse(clock: Clock) -> None:
    instance = group(Problem.read(INSTANCES / "mix30-100gpus.json"))
    listed = list_schedule(instance, 0.0, LookClock(1))
    energy = annealing.makespan_energy(ends_at(instance, listed))
    found = annealing.anneal(instance, listed, energy, random.Random(5), clock, hot=1.0, cold=0.01)
    assert ends_at(instance, found) <= ends_at(instance, listed) * (1 + 1e-9)


def test_draws_are_spread_evenly() -> None:
    seed = seeded(random.Random(1))
    drawn = [draw(seed) for _ in range(4000)]
    assert 0 <= min(drawn) < 0.01
    assert 0.99 < max(drawn) < 1
    assert sum(drawn) / len(drawn) == pytest.approx(0.5, abs=0.03)


def test_planning_goes_on_while_nothing_is_compiled_yet(tmp_path: Path) -> None:
    """Where compiled code never gets ready, a plan comes in time, and another process compiles on."""
    code = """
import sys, threading
from saturn_airflow.planning import solve, warming
from saturn_airflow.model.problem import Problem
warming.warm = lambda: threading.Event().wait()
sys.executable = sys.argv[2]
plan = solve(Problem.read(sys.argv[1]), time_limit=3.0)
assert plan.assignments and 0 < plan.lower_bound <= plan.makespan
"""
    # Stands for the Python that is to compile the rest.
    later, told, planned = tmp_path / "python", tmp_path / "told", tmp_path / "planned"
    later.write_text(f"""#!{sys.executable}
import os, pathlib, sys, time
deadline = time.monotonic() + 100
while not pathlib.Path("{planned}").exists() and time.monotonic() < deadline:
    time.sleep(0.1)
part = pathlib.Path("{told}.part")
part.write_text(sys.argv[2] + " " + str(os.getsid(0)))
part.rename("{told}")
""")
    later.chmod(0o700)
    file = str(INSTANCES / "mix50-8x8.json")
    done = subprocess.run(
        [sys.executable, "-c", code, file, str(later)], timeout=120, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert not told.exists(), "the plan has waited for it"
    planned.touch()
    deadline = time.monotonic() + 60
    while not told.exists():
        assert time.monotonic() < deadline, "nothing compiles on"
        time.sleep(0.1)
    asked, session = told.read_text().rsplit(maxsplit=1)
    assert asked.endswith("warm_once()")
    assert int(session) != os.getsid(0)


def test_no_set_of_jobs_is_packed_for_long() -> None:
    chance = random.Random(9)
    jobs = []
    for n in range(30):
        alone = chance.uniform(300, 6000)
        seconds = {width: alone / width**0.8 * chance.uniform(0.9, 1.1) for width in (1, 2, 4, 8)}
        jobs.append(PlannedJob(f"j{n}", tuple(Option("t", g, {"cpu": s}) for g, s in seconds.items())))
    nodes = tuple(Node(f"of{width}", width, "cpu") for width in (8, 4, 2, 1))
    instance = group(Problem("x", nodes, tuple(jobs)))
    listed = list_schedule(instance, simple_bound(instance), LookClock(1))
    pool = PoolSearch(instance, listed, ends_at(instance, listed) * 0.96, random.Random(3), 1500)
    pool.run(LookClock(0.5))
    # Branches that were spent on a set without a look at the clock between them.
    assert 1500 < pool.memory.spent[:, 0].max() <= 10_000
