"""Rounds that are planned while others are active: who waits before them counts, and who runs stays."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saturn_airflow.model.cluster import Node
from saturn_airflow.model.plan import Assignment, Place, Plan
from saturn_airflow.model.problem import Option, PlannedJob, Problem
from saturn_airflow.model.sharing import SharedCluster, SharedJob, SharedSweep, SharingRules
from saturn_airflow.planning.online.adoption import Adoption, Effort, decide
from saturn_airflow.planning.online.execution import Situation
from saturn_airflow.planning.warming import warm
from saturn_airflow.sharing.among import around
from saturn_airflow.sharing.forecast import plan_together
from saturn_airflow.sharing.round_among import RoundBegins

A, B = Node("a", 2, "cpu"), Node("b", 2, "cpu")
RULES = SharingRules()
NOW = 1_795_000_000.0
CHECKPOINT = 5.0


def job(name: str, seconds: float, *widths: int, nodes: tuple[str, ...] | None = None) -> PlannedJob:
    """A job that scales with nine tenths of its devices."""
    options = tuple(
        Option("ddp", w, {"cpu": 2 + seconds / (0.9 * w if w > 1 else 1)}, 2) for w in widths or (1,)
    )
    return PlannedJob(name, options, nodes)


def other(*jobs: SharedJob, priority: float = 0.0, preempt: bool = False, name: str = "other") -> SharedSweep:
    return SharedSweep(name, jobs, NOW, 60.0, priority, preempt=preempt)


def cluster(*sweeps: SharedSweep) -> SharedCluster:
    return SharedCluster(NOW, (A, B), sweeps)


def plan(*places: tuple[str, Place], end: float = 1.0) -> Plan:
    """One whose times tell nothing."""
    found = (Assignment(name, p.technique, p.devices, p.node, p.device_ids, 0.0, end) for name, p in places)
    return Plan("own", "makespan", end, 0.0, 0.1, tuple(found))


def on(node: str, *ids: int) -> Place:
    return Place("ddp", len(ids), node, ids)


FACTS = SharedSweep("own", (), NOW - 30, 60.0)
#: Half a minute ago six jobs were planned, of which two wait.
RUNNING = {"j0": on("a", 0), "j1": on("a", 1), "j2": on("b", 0), "j3": on("b", 1)}
STANDING = plan(*RUNNING.items(), ("j4", on("a", 0)), ("j5", on("a", 1)))
SITUATION = Situation({"j0": 0.6, "j1": 0.6, "j2": 0.75, "j3": 0.75, "j4": 1.0, "j5": 1.0}, running=RUNNING)
SIX = tuple(job(f"j{i}", 60) for i in range(6))


def decided(others: SharedCluster) -> tuple[Adoption, Adoption]:
    """What is decided around those that run, and among all."""
    warm()
    problem = around(Problem("own", (A, B), SIX), others, RULES, RUNNING.values())
    effort = Effort(time_limit=0.2, repeatable=True)
    exact = decide(problem, STANDING, SITUATION, effort=effort, checkpoint=CHECKPOINT)
    found = RoundBegins(problem, SITUATION, FACTS, others, RULES, CHECKPOINT).decide(exact, STANDING)
    assert found is not None
    return exact, found[0]


def test_a_round_leaves_the_node_to_who_waits_for_it_with_a_higher_priority() -> None:
    wide = other(SharedJob(job("wide", 180, 2, nodes=("a",))), priority=10)
    exact, found = decided(cluster(wide))
    assert exact.moved, "alone it pays to let what waits begin, and to go on with the others later"
    assert found.adopted
    assert found.moved == ()
    where = {a.job: a.node for a in found.plan.assignments}
    assert where == {**{name: place.node for name, place in RUNNING.items()}, "j4": "b", "j5": "b"}
    assert found.plan.makespan == pytest.approx(45 + 62)
    assert found.otherwise == pytest.approx(36 + 102 + 62), "behind the other one"


def test_a_round_that_wins_nothing_changes_nothing() -> None:
    on_b = replace(
        STANDING,
        assignments=(*STANDING.assignments[:4], *plan(("j4", on("b", 0)), ("j5", on("b", 1))).assignments),
    )
    problem = Problem("own", (A, B), SIX)
    exact = Adoption(STANDING, True, 1.0, 2.0, (), math.inf)
    wide = other(SharedJob(job("wide", 180, 2, nodes=("a",))), priority=10)
    found = RoundBegins(problem, SITUATION, FACTS, cluster(wide), RULES, CHECKPOINT).decide(exact, on_b)
    assert found is not None
    assert not found[0].adopted


def test_a_running_job_moves_only_to_devices_that_it_has_at_once() -> None:
    """Long and narrow, it would be done earlier on the whole node that is soon free."""
    problem = Problem("own", (A, B), (job("long", 1000, 1, 2),))
    situation = Situation({"long": 1.0}, {"long": on("b", 0)})
    exact = Adoption(plan(("long", on("a", 0, 1))), True, 1.0, 2.0, ("long",), math.inf)
    before = plan(("long", on("b", 0)))
    held = other(SharedJob(job("short", 20, 2, nodes=("a",)), place=on("a", 0, 1)))
    behind = other(SharedJob(job("waits", 50, 1, nodes=("b",))), name="behind")
    for others, moves in ((cluster(behind), True), (cluster(held, behind), False)):
        found = RoundBegins(problem, situation, FACTS, others, RULES, CHECKPOINT).decide(exact, before)
        assert found is not None
        assert found[0].moved == (("long",) if moves else ())
        assert found[0].adopted is moves
        if moves:
            assert found[0].plan.makespan == pytest.approx(CHECKPOINT + 2 + 1000 / 1.8)


def test_a_plan_whose_node_is_gone_does_not_stand() -> None:
    problem = Problem("own", (B,), SIX)
    wide = other(SharedJob(job("wide", 180, 2, nodes=("b",))), priority=-1)
    exact = Adoption(
        plan(*((f"j{i}", on("b", i % 2)) for i in range(6))), True, 1.0, math.inf, ("j0", "j1"), math.inf
    )
    others = SharedCluster(NOW, (B,), (wide,))
    found = RoundBegins(problem, SITUATION, FACTS, others, RULES, CHECKPOINT).decide(exact, STANDING)
    assert found is not None
    assert found[0].otherwise == math.inf
    assert found[0].moved == (), "what ran on a lost node runs nowhere"
    assert {a.node for a in found[0].plan.assignments} == {"b"}


def test_where_its_jobs_run_nobody_else_does() -> None:
    """What was read of others a moment before may be over."""
    late = other(SharedJob(job("late", 500, 1, nodes=("a",)), place=on("a", 0)))
    _, found = decided(SharedCluster(NOW, (A, B), (late,), busy={("a", 1): NOW + 300}))
    ends = {a.job: a.end for a in found.plan.assignments}
    assert ends["j0"] == ends["j1"] == pytest.approx(36)
    assert found.plan.makespan == pytest.approx(36 + 62)


def bound_to(place: Place, one: PlannedJob) -> PlannedJob:
    """The job, as a plan has it that stands."""
    return replace(
        one, options=tuple(o for o in one.options if o.devices == place.devices), nodes=(place.node,)
    )


@pytest.mark.slow
@given(st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_a_round_never_ends_later_than_the_plan_that_stands_and_moves_nobody_to_wait(
    data: st.DataObject,
) -> None:
    nodes = (Node("a", 4, "cpu"), Node("b", 2, "cpu"))
    free = {node.name: list(range(node.devices)) for node in nodes}
    seconds, shares = st.floats(10, 3000), st.floats(0.01, 1)

    def placed(node: str, width: int) -> Place | None:
        if len(free[node]) < width or not data.draw(st.booleans()):
            return None
        ids, free[node] = free[node][:width], free[node][width:]
        return Place("ddp", width, node, tuple(ids))

    def drawn() -> tuple[str, int]:
        return data.draw(st.sampled_from("ab")), data.draw(st.sampled_from([1, 2]))

    own, standing, asked, running = [], {}, {}, {}
    for number in range(data.draw(st.integers(1, 5))):
        one = job(f"j{number}", data.draw(seconds), 1, 2)
        node, width = drawn()
        own.append(one)
        standing[one.name] = Place("ddp", width, node, tuple(range(width)))
        if place := placed(node, width):
            running[one.name] = standing[one.name] = place
        node, width = drawn()
        asked[one.name] = Place("ddp", width, node, tuple(range(width)))
    sweeps = []
    for number in range(data.draw(st.integers(1, 3))):
        jobs = []
        for index in range(data.draw(st.integers(1, 3))):
            node, width = drawn()
            one = job(f"o{index}", data.draw(seconds), 1, 2, nodes=(node,))
            jobs.append(SharedJob(one, data.draw(shares), placed(node, width)))
        priority = data.draw(st.sampled_from([-1.0, 0.0, 1.0]))
        sweeps.append(other(*jobs, priority=priority, preempt=data.draw(st.booleans()), name=f"s{number}"))
    moved = tuple(sorted(name for name in running if data.draw(st.booleans())))
    asked |= {name: place for name, place in running.items() if name not in moved}
    left = {one.name: data.draw(shares) for one in own}
    others = SharedCluster(NOW, nodes, tuple(sweeps))
    problem, situation = Problem("own", nodes, tuple(own)), Situation(left, running)
    begins = RoundBegins(problem, situation, FACTS, others, RULES, CHECKPOINT)
    exact = Adoption(plan(*asked.items()), True, 1.0, 2.0, moved, math.inf)
    found = begins.decide(exact, plan(*standing.items()))
    assert found is not None
    adoption, among = found
    # If nothing changes: everybody as he is, and this sweep by its plan.
    as_it_is = tuple(
        SharedJob(bound_to(standing[one.name], one), left[one.name], running.get(one.name)) for one in own
    )
    stands = plan_together(replace(others, sweeps=(*sweeps, replace(FACTS, jobs=as_it_is))), RULES)
    assert adoption.plan.makespan <= stands.sweeps["own"] - NOW + 1e-6
    assert {a.job for a in adoption.plan.assignments} == set(left)
    assert set(adoption.moved) <= set(moved)
    for a in adoption.plan.assignments:
        if a.job in adoption.moved:
            assert a.start <= CHECKPOINT + 1e-3
        elif a.job in running:
            assert (Place.of(a), a.start) == (running[a.job], 0.0)
    assert adoption.adopted or adoption.moved == ()
    assert [(one.name, len(one.job.options)) for one in among.jobs] == [(one.name, 1) for one in own]
