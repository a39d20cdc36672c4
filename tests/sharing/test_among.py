"""Plans of sweeps that begin while others are active, and what is said of those that wait."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saturn_airflow.model.cluster import Node
from saturn_airflow.model.plan import Assignment, Place, Plan
from saturn_airflow.model.problem import Option, PlannedJob, Problem
from saturn_airflow.model.sharing import (
    Pace,
    SharedCluster,
    SharedJob,
    SharedSweep,
    SharingRules,
    least_seconds,
)
from saturn_airflow.planning import solve
from saturn_airflow.planning.instances.instance import group
from saturn_airflow.planning.lower_bounds.area import simple_bound
from saturn_airflow.sharing.among import around, meets_others, plan_among
from saturn_airflow.sharing.elsewhere import look_elsewhere
from saturn_airflow.sharing.forecast import plan_together
from saturn_airflow.sharing.outlook import goes_before, outlooks
from saturn_airflow.sharing.pace import at_pace_seen

NODES = (Node("a", 4, "gpu"), Node("b", 2, "gpu"))
RULES = SharingRules()
NOW = 1_795_000_000.0  # of the epoch: numbers this large have few digits for parts of seconds


def job(name: str, seconds: float, *widths: int, nodes: tuple[str, ...] | None = None) -> PlannedJob:
    """A job that scales with nine tenths of its devices."""
    options = tuple(
        Option("ddp", w, {"gpu": 5 + seconds / (0.9 * w if w > 1 else 1)}, 5) for w in widths or (1, 2, 4)
    )
    return PlannedJob(name, options, nodes)


def sweep(name: str, *jobs: SharedJob, preempt: bool = False, priority: float = 0.0) -> SharedSweep:
    fitting = tuple(one.job for one in jobs if any(o.devices <= 4 for o in one.job.options))
    alone = least_seconds(fitting, NODES) if fitting else 1.0
    return SharedSweep(name, jobs, NOW, alone, priority, preempt=preempt)


def running(one: PlannedJob, node: str, *ids: int, left: float = 1.0) -> SharedJob:
    return SharedJob(one, left, Place("ddp", len(ids), node, ids), since=NOW - 100)


def alone_of(problem: Problem) -> Plan:
    """A plan one after another on the first node that suits each job."""
    then, found = 0.0, []
    for one in problem.jobs:
        node, option = next((n, o) for n in problem.nodes for o in one.options if Problem.fits(one, o, n))
        end = then + option.seconds["gpu"]
        found.append(
            Assignment(one.name, "ddp", option.devices, node.name, tuple(range(option.devices)), then, end)
        )
        then = end
    return Plan("own", "makespan", then, simple_bound(group(problem)), 0.1, tuple(found))


def planned(*jobs: PlannedJob, others: SharedCluster, facts: SharedSweep | None = None) -> Plan:
    problem = around(Problem("own", NODES, jobs), others, RULES)
    found = plan_among(problem, alone_of(problem), facts or sweep("own"), others, RULES)
    assert found is not None
    return found


def test_a_plan_waits_for_who_does_not_give_way_and_takes_the_node_that_is_free() -> None:
    long = sweep("long", *(running(job(f"l{i}", 9000, 1), "a", i) for i in range(4)))
    found = planned(job("own", 100, 2), others=SharedCluster(NOW, NODES, (long,)))
    assert (found.assignments[0].node, found.assignments[0].start) == ("b", 0.0)
    both = sweep("long", *long.jobs, running(job("l4", 600, 2), "b", 0, 1))
    found = planned(job("own", 100, 2), others=SharedCluster(NOW, NODES, (both,)))
    assert found.assignments[0].start > 300
    assert found.makespan == found.assignments[0].end


def test_who_goes_first_does_not_wait_for_those_that_give_way() -> None:
    long = sweep("long", *(running(job(f"l{i}", 90000, 1), "a", i) for i in range(4)), preempt=True)
    others = SharedCluster(NOW, (NODES[0],), (long,))
    found = planned(job("own", 100, 4, nodes=("a",)), others=others, facts=sweep("own", priority=1.0))
    assert found.assignments[0].start < 60


def test_jobs_run_thriftily_among_others_that_wait() -> None:
    waiting = [sweep(f"s{i}", SharedJob(job("w", 4000))) for i in range(6)]
    jobs = [job(f"j{i}", 3000) for i in range(4)]
    wide = planned(*jobs, others=SharedCluster(NOW, NODES, ()))
    thrifty = planned(*jobs, others=SharedCluster(NOW, NODES, tuple(waiting)))
    assert sum(a.devices * a.seconds for a in thrifty.assignments) <= sum(
        a.devices * a.seconds for a in wide.assignments
    )


@given(st.data())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_a_plan_among_others_is_a_plan(data: st.DataObject) -> None:
    number = st.floats(10, 5000)
    widths = st.sampled_from([(1, 2, 4), (2, 4), (1,), (4,), (1, 2)])
    free = {("a", d) for d in range(4)} | {("b", d) for d in range(2)}
    others = []
    for s in range(data.draw(st.integers(1, 4))):
        jobs = []
        for j in range(data.draw(st.integers(1, 3))):
            one = job(f"o{j}", data.draw(number), 1, 2)
            node, width = data.draw(st.sampled_from(["a", "b"])), data.draw(st.sampled_from([1, 2]))
            ids = [d for n, d in sorted(free) if n == node][:width]
            if len(ids) == width and data.draw(st.booleans()):
                free -= {(node, d) for d in ids}
                jobs.append(running(one, node, *ids, left=data.draw(st.floats(0.01, 1))))
            else:
                jobs.append(SharedJob(replace(one, nodes=(node,))))
        others.append(sweep(f"s{s}", *jobs, preempt=data.draw(st.booleans())))
    own = [job(f"j{j}", data.draw(number), *data.draw(widths)) for j in range(data.draw(st.integers(1, 5)))]
    cluster = SharedCluster(NOW, NODES, tuple(others))
    problem = around(Problem("own", NODES, tuple(own)), cluster, RULES)
    alone = alone_of(problem)
    found = plan_among(problem, alone, sweep("own"), cluster, RULES)
    assert found is not None
    assert {a.job for a in found.assignments} == {one.name for one in own}
    spans = defaultdict(list)
    for a in found.assignments:
        assert len(a.device_ids) == a.devices
        option = next(o for o in next(j for j in own if j.name == a.job).options if o.devices == a.devices)
        assert a.seconds == pytest.approx(option.seconds["gpu"], rel=1e-6)
        for device in a.device_ids:
            spans[a.node, device].append((a.start, a.end))
    for at_one in spans.values():
        assert all(later[0] >= first[1] - 1e-6 for first, later in itertools.pairwise(sorted(at_one)))
    # What others run lets nobody end before the bound, whatever the turns.
    assert found.makespan >= alone.lower_bound - 1e-6


def test_a_plan_knows_when_devices_are_free_of_what_others_run() -> None:
    one, two = job("one", 800, 1), job("two", 800, 1)
    stays = sweep("stays", running(one, "a", 0, left=0.5), running(two, "a", 1, left=0.0))
    gives_way = sweep("gives", running(one, "b", 0), running(two, "b", 1, left=0.01), preempt=True)
    gives_way = replace(gives_way, jobs=(replace(gives_way.jobs[0], leaves_in=40.5), gives_way.jobs[1]))
    cluster = SharedCluster(NOW, NODES, (stays, gives_way), {("a", 3): NOW + 60.7, ("a", 9): NOW + 5})
    problem = Problem("own", NODES, (job("j", 100, 1),))
    # Who gives way needs time to leave, unless it ends before.
    assert around(problem, cluster, RULES).free == {"a": (400, 0, 0, 60), "b": (40, 8)}
    quiet = replace(gives_way.jobs[0], stopped=NOW - RULES.quiet + 100)
    again = replace(cluster, sweeps=(replace(gives_way, jobs=(quiet,)),))
    assert around(problem, again, RULES).free["b"] == (140, 0)
    # It was stopped before its node's clock was set back.
    ahead = replace(again.sweeps[0], jobs=(replace(quiet, stopped=NOW + 86400), gives_way.jobs[1]))
    again = replace(cluster, sweeps=(stays, ahead))
    assert around(problem, again, RULES).free["b"] == (40, 8)
    leaving = replace(gives_way.jobs[0], leaving=NOW + 7)
    again = replace(cluster, sweeps=(replace(gives_way, jobs=(leaving,)),))
    assert around(problem, again, RULES).free["b"] == (7, 0)
    # Where a job of its own runs, that has the device, whatever the ledger says.
    assert around(problem, cluster, RULES, [Place("ddp", 1, "a", (0,))]).free["a"] == (0, 0, 0, 60)


def test_the_bound_of_a_plan_among_others_is_that_of_the_devices_that_they_leave() -> None:
    long = sweep("long", *(running(job(f"l{i}", 9000, 1), "a", i) for i in range(4)))
    long = replace(long, jobs=(*long.jobs, running(job("l4", 600, 2), "b", 0, 1)))
    cluster = SharedCluster(NOW, NODES, (long,))
    problem = around(Problem("own", NODES, (job("own", 100, 2),)), cluster, RULES)
    alone = solve(problem, time_limit=5.0)
    found = plan_among(problem, alone, sweep("own"), cluster, RULES)
    assert found is not None
    assert found.gap == pytest.approx(0, abs=0.01)
    assert found.lower_bound > 380
    mean = solve(problem, time_limit=0.5, objective="mean-completion")
    assert (among := plan_among(problem, mean, sweep("own"), cluster, RULES)) is not None
    assert among.value == pytest.approx(among.makespan)
    assert among.gap == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize(("preempt", "at_once", "later"), [(True, 10, 13), (False, 405, 405)])
def test_a_sweep_has_nothing_before_its_jobs_ask(preempt: bool, at_once: float, later: float) -> None:
    """Who is to give way to it leaves after that, who ends by itself does so without it."""
    two = [running(job(f"r{i}", 800, 1), "b", i, left=0.5) for i in range(2)]
    other = sweep("other", *(replace(one, leaves_in=10.0, setting_up=5.0) for one in two), preempt=preempt)
    others = SharedCluster(NOW, NODES[1:], (other,))
    for asks, start in ((0.0, at_once), (NOW + 3, later)):
        facts = replace(sweep("own", priority=1.0), asks=asks)
        found = planned(job("own", 100, 1, nodes=("b",)), others=others, facts=facts)
        assert found.assignments[0].start == pytest.approx(start, abs=1e-3)
    waiting = replace(sweep("own", SharedJob(job("own", 100, 1, nodes=("a",)))), asks=NOW + 3)
    plan = plan_together(SharedCluster(NOW, NODES, (waiting,)), RULES)
    assert (plan.decision.starts, plan.jobs["own", "own"].start) == ((), NOW + 3)
    # Its jobs were faster than Airflow mostly is: what runs has its devices.
    begun = replace(waiting, jobs=(running(waiting.jobs[0].job, "a", 0, left=0.5),))
    plan = plan_together(SharedCluster(NOW, NODES, (begun, sweep("new", *waiting.jobs))), RULES)
    assert {stay.place.device_ids for key in plan.jobs for stay in plan.jobs[key].stays} == {(0,), (1,)}
    assert plan.sweeps["own"] == pytest.approx(NOW + 50, abs=1e-3)


def test_what_is_off_is_expected_as_it_was_seen() -> None:
    two = (running(job("one", 8000, 1), "a", 0, left=0.5), SharedJob(job("two", 8000, 1)))
    as_told = sweep("s", *two)
    kinds = {node.name: node.kind for node in NODES}

    def expected(pace: Pace) -> tuple[float, float]:
        found = at_pace_seen(as_told, {"one": pace}, kinds, 0.1)
        one, other = (each.job.options[0].seconds["gpu"] - 5 for each in found.jobs)
        return one / 8000, other / 8000

    assert expected(Pace(0.1, 1600, False))[0] == pytest.approx(2, rel=0.02)
    assert 1.2 < expected(Pace(0.1, 1600, False))[1] < 1.6, "one like it, less surely so"
    assert expected(Pace(0.1, 400, True))[0] == pytest.approx(0.5, rel=0.02)
    for tells_little in (
        Pace(0.1, 400, False),  # evaluations may be to come
        Pace(0.1, 870, True),
        Pace(0.001, 59, False),
        Pace(0.01, 150, False),
        Pace(0.0, 900, False),
    ):
        assert at_pace_seen(as_told, {"one": tells_little}, kinds, 0.1) is as_told
    assert at_pace_seen(as_told, {"two": Pace(0.1, 1600, True)}, kinds, 0.1) is as_told, "it does not run"
    assert at_pace_seen(as_told, {"one": Pace(0.1, 1600, True)}, {}, 0.1) is as_told


def test_what_waits_is_better_elsewhere_once_another_has_ended() -> None:
    long = sweep("long", *(running(job(f"l{i}", 9000, 1), "a", i) for i in range(4)))
    own = sweep("own", running(job("runs", 400, 2), "b", 0, 1), SharedJob(job("waits", 800, 4, nodes=("a",))))
    cluster = SharedCluster(NOW, NODES, (long, own))
    anywhere = {"runs": ("a", "b"), "waits": ("a", "b")}
    assert look_elsewhere(cluster, RULES, "own", anywhere).won == 0, "it does not fit on the other node"
    narrow = replace(own, jobs=(own.jobs[0], SharedJob(job("waits", 800, 1, 2, nodes=("a",)))))
    found = look_elsewhere(replace(cluster, sweeps=(long, narrow)), RULES, "own", anywhere)
    assert found.here - NOW > 9000
    assert found.there - NOW < 1000
    # What runs stays, and who may run on no other node waits.
    stays = look_elsewhere(replace(cluster, sweeps=(long, narrow)), RULES, "own", {"waits": ("a",)})
    assert stays.won == 0
    # A round's job keeps its strategy where it waits; one elsewhere may have another.
    wide = SharedJob(job("waits", 800, 1, 2, 4, nodes=("a",)), keeps=("ddp", 4))
    soon = sweep("soon", running(job("s", 900, 1), "a", 0), running(job("t", 9000, 1), "a", 1))
    cluster = SharedCluster(NOW, NODES, (soon, replace(own, jobs=(own.jobs[0], wide))))
    found = look_elsewhere(cluster, RULES, "own", anywhere)
    assert found.here - NOW > 9000, "two devices are free at once, and four much later"
    assert found.there - NOW < 1000


def test_only_those_on_its_nodes_are_others() -> None:
    problem = Problem("own", (NODES[1],), (job("own", 100, 1),))
    on_a = sweep("s", running(job("l", 900, 1), "a", 0), SharedJob(job("w", 10, 1, nodes=("a",))))
    assert not meets_others(problem, SharedCluster(NOW, NODES, (on_a,)))
    on_b = sweep("s", SharedJob(job("w", 10, 1, nodes=("b",))))
    assert meets_others(problem, SharedCluster(NOW, NODES, (on_b,)))


def test_who_waits_learns_for_whom_and_who_goes_first_and_why() -> None:
    long = sweep("long", *(running(job(f"l{i}", 9000, 1), "a", i) for i in range(4)))
    urgent = sweep("urgent", SharedJob(job("u", 100, 4)), priority=3)
    small = sweep("small", SharedJob(job("s", 10, 1, nodes=("a",))))
    own = sweep("own", SharedJob(job("big", 800, 1, nodes=("a",))), SharedJob(job("wide", 10, 8)))
    cluster = SharedCluster(NOW, (NODES[0],), (long, urgent, small, own))
    first, lost = outlooks(cluster, plan_together(cluster, RULES), own)
    assert (first.job, first.place, lost.job, lost.expected) == ("big", None, "wide", None)
    assert first.expected is not None
    (holder,) = first.holders
    assert (holder.sweep, holder.gives_way, holder.until) == ("long", False, pytest.approx(NOW + 9000))  # type: ignore[comparison-overlap]
    before = goes_before(cluster, RULES, own)
    assert list(before) == ["urgent", "small"]
    assert before["urgent"] == "its priority is 3, and 0 here"
    assert "less left to do" in before["small"]
