"""A running job is not moved between equal nodes where nothing is gained by it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from saturn_airflow.model.cluster import Node
from saturn_airflow.model.plan import Assignment, Place, Plan
from saturn_airflow.model.problem import Option, PlannedJob, Problem
from saturn_airflow.planning.online.adoption import Effort, decide
from saturn_airflow.planning.online.equal_nodes import stay_among_equals
from saturn_airflow.planning.online.execution import Situation

NODES = (Node("a", 2, "gpu"), Node("b", 2, "gpu"), Node("old", 2, "slow"))


def job(name: str, nodes: tuple[str, ...] | None = None) -> PlannedJob:
    options = tuple(Option("t", k, {"gpu": 100.0, "slow": 100.0}, 1.0) for k in (1, 2))
    return PlannedJob(name, options, nodes)


def plan(*assigned: Assignment) -> Plan:
    end = max(a.end for a in assigned)
    return Plan("p", "makespan", end, end, 0.0, assigned)


def on(name: str, node: str, ids: tuple[int, ...], start: float = 0.0, end: float = 100.0) -> Assignment:
    return Assignment(name, "t", len(ids), node, ids, start, end)


def nodes_of(found: Plan) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {a.job: (a.node, a.device_ids) for a in found.assignments}


def test_what_runs_stays_and_who_comes_goes_to_the_other() -> None:
    problem = Problem("p", NODES, (job("runs"), job("after"), job("new"), job("beside")))
    first = plan(
        on("runs", "b", (0,)), on("after", "b", (0,), 100, 200), on("beside", "b", (1,)), on("new", "a", (1,))
    )
    found = stay_among_equals(first, problem, {"runs": Place("t", 1, "a", (0,))})
    assert nodes_of(found) == {
        "runs": ("a", (0,)),
        "after": ("a", (0,)),
        "beside": ("b", (1,)),
        "new": ("a", (1,)),
    }
    assert [(a.start, a.end) for a in found.assignments] == [(a.start, a.end) for a in first.assignments]


@pytest.mark.parametrize(
    ("bound", "place"),
    [
        (("b",), Place("t", 1, "a", (0,))),  # another job on its devices may run on the other node alone
        (None, Place("t", 1, "old", (0,))),  # the nodes are not equal
        (None, Place("u", 1, "a", (0,))),  # it runs under something else
    ],
)
def test_nothing_is_exchanged_that_must_not_be(bound: tuple[str, ...] | None, place: Place) -> None:
    problem = Problem("p", NODES, (job("runs"), job("after", bound)))
    first = plan(on("runs", "b", (0,)), on("after", "b", (0,), 100, 200))
    assert stay_among_equals(first, problem, {"runs": place}) == first


def test_who_stays_already_is_not_moved_for_another() -> None:
    problem = Problem("p", NODES, (job("one"), job("two")))
    running = {"one": Place("t", 2, "a", (0, 1)), "two": Place("t", 2, "a", (0, 1))}
    first = plan(on("one", "a", (0, 1)), on("two", "b", (0, 1)))
    assert stay_among_equals(first, problem, running) == first


@pytest.mark.parametrize("seed", range(30))
def test_an_exchange_leaves_a_plan(seed: int) -> None:
    chance = random.Random(seed)
    nodes = tuple(Node(f"n{i}", 4, "gpu") for i in range(3))
    free = {(node.name, device): 0.0 for node in nodes for device in range(4)}
    assigned, running = [], {}
    for number in range(14):
        width, node = chance.choice([1, 1, 2, 4]), chance.choice(nodes).name
        ids = tuple(sorted(chance.sample(range(4), width)))
        start = max(free[node, device] for device in ids)
        end = start + chance.choice([50.0, 100.0])
        free.update({(node, device): end for device in ids})
        assigned.append(on(f"j{number}", node, ids, start, end))
        if start == 0 and chance.random() < 0.8:
            running[f"j{number}"] = Place("t", width, chance.choice(nodes).name, ids)
    options = tuple(Option("t", k, {"gpu": 100.0}, 1.0) for k in (1, 2, 4))
    problem = Problem("p", nodes, tuple(PlannedJob(a.job, options) for a in assigned))
    first = plan(*assigned)
    found = stay_among_equals(first, problem, running)
    spans: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for old, new in zip(first.assignments, found.assignments, strict=True):
        assert replace(new, node=old.node, device_ids=old.device_ids) == old
        assert len(set(new.device_ids)) == new.devices
        for device in new.device_ids:
            spans.setdefault((new.node, device), []).append((new.start, new.end))
    for taken in map(sorted, spans.values()):
        assert all(a[1] <= b[0] for a, b in zip(taken, taken[1:]))  # noqa: B905, RUF007
    kept = [
        sum(running.get(a.job) is not None and running[a.job].node == a.node for a in p.assignments)
        for p in (first, found)
    ]
    assert kept[1] >= kept[0]


@pytest.mark.parametrize("seed", range(4))
def test_a_boundary_moves_nobody_between_equal_nodes(seed: int) -> None:
    chance = random.Random(seed)
    nodes = tuple(Node(f"n{i}", 2, "gpu") for i in range(3))
    jobs = tuple(
        PlannedJob(f"j{i}", (Option("t", 2, {"gpu": chance.uniform(50, 200)}, 1.0),)) for i in range(7)
    )
    places = chance.sample(nodes, 3)
    running = {f"j{i}": Place("t", 2, node.name, (0, 1)) for i, node in enumerate(places)}
    left = {job.name: chance.uniform(0.3, 0.9) if job.name in running else 1.0 for job in jobs}
    effort = Effort(time_limit=0.3, repeatable=True, seed=seed)
    found = decide(Problem("p", nodes, jobs), None, Situation(left, running), effort=effort, checkpoint=30.0)
    first = {a.job: a.start for a in found.plan.assignments}
    assert not [job for job in found.moved if first[job] < 40], "it goes on at once, but elsewhere"
