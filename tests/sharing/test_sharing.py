"""Sweeps that share a cluster: whatever happens, no device runs two jobs, and nothing is lost."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
from collections import defaultdict
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saturn_airflow.model.cluster import Node
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.plan import Place
from saturn_airflow.model.problem import Option, PlannedJob
from saturn_airflow.model.sharing import (
    SharedCluster,
    SharedJob,
    SharedSweep,
    SharingRules,
    least_seconds,
)
from saturn_airflow.sharing.forecast import plan_together
from saturn_airflow.sharing.outlook import goes_before
from saturn_airflow.sharing.replay import Arrival, NodeChange, Replay, StayOnDevices, replay
from saturn_airflow.sharing.turns import Decision, decide

NODES = (Node("a", 4, "gpu"), Node("b", 4, "gpu"), Node("c", 2, "old"))
RULES = SharingRules(checkpoint=5.0, quiet=200.0, largest_stretch=5.0)


def job(
    name: str, work: float, *widths: int, setup: float = 10.0, nodes: tuple[str, ...] | None = None
) -> PlannedJob:
    """A job that takes so many seconds on one device."""
    options = [
        Option(
            "t", k, {kind: setup + slow * work / k**0.7 for kind, slow in (("gpu", 1.0), ("old", 2.0))}, setup
        )
        for k in widths or (1, 2, 4)
    ]
    return PlannedJob(name, tuple(options), nodes)


def sweep(name: str, arrived: float, *jobs: PlannedJob, preempt: bool = True, **more: object) -> SharedSweep:
    """A sweep of which nothing is done."""
    alone = least_seconds(jobs, NODES)
    return SharedSweep(name, tuple(map(SharedJob, jobs)), arrived, alone, preempt=preempt, **more)  # type: ignore[arg-type]


def drawn(seed: int, number: int) -> list[Arrival]:
    """Sweeps of all sorts, with jobs that take up to twice or half of what is expected."""
    chance = random.Random(seed)
    found, now = [], 0.0
    for i in range(number):
        now += chance.expovariate(1 / 150)
        jobs = tuple(
            job(
                f"j{j}",
                chance.lognormvariate(5, 1),
                *chance.choice([(1, 2, 4), (2, 4), (4,), (1,), (1, 3)]),
                nodes=chance.choice([None, None, None, ("a", "b")]),
            )
            for j in range(chance.randint(1, 4))
        )
        own = sweep(
            f"s{i}",
            now,
            *jobs,
            preempt=chance.random() < 0.7,
            priority=chance.choice([0.0, 0.0, 0.0, 1.0]),
            team=chance.choice(["x", "y", ""]),
            deadline=chance.choice([None, now + 500]),
        )
        found.append(Arrival(own, tuple(_actual(one, chance.uniform(0.5, 2)) for one in jobs)))
    return found


def _actual(one: PlannedJob, factor: float) -> PlannedJob:
    options = tuple(
        dataclasses.replace(o, seconds={k: o.setup + (s - o.setup) * factor for k, s in o.seconds.items()})
        for o in one.options
    )
    return dataclasses.replace(one, options=options)


def assert_no_device_twice(ran: Sequence[StayOnDevices]) -> None:
    """No device runs two jobs, no job runs in two places, and places are real."""
    sizes = {node.name: node.devices for node in NODES}
    spans: dict[object, list[tuple[float, float]]] = defaultdict(list)
    for r in ran:
        assert len(set(r.place.device_ids)) == r.place.devices
        assert all(0 <= d < sizes[r.place.node] for d in r.place.device_ids)
        for d in r.place.device_ids:
            spans[r.place.node, d].append((r.start, r.end))
        spans[r.sweep, r.job].append((r.start, r.end))
    for found in spans.values():
        found.sort()
        assert all(b[0] >= a[1] - 1e-6 for a, b in itertools.pairwise(found))


def assert_all_trained(arrivals: Sequence[Arrival], found: Replay) -> None:
    """Every job trained all of its batches, once."""
    trained: dict[tuple[str, str], float] = defaultdict(float)
    for r in found.ran:
        trained[r.sweep, r.job] += r.trained
    for arrival in arrivals:
        for one in arrival.sweep.jobs:
            assert trained[arrival.sweep.name, one.name] == pytest.approx(1.0, abs=1e-6)
        assert found.done[arrival.sweep.name] >= arrival.sweep.arrived


@given(st.integers(0, 10**6), st.integers(1, 12))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_no_device_runs_two_jobs_and_no_step_is_lost(seed: int, number: int) -> None:
    arrivals = drawn(seed, number)
    found = replay(arrivals, NODES, RULES)
    assert_no_device_twice(found.ran)
    assert_all_trained(arrivals, found)
    assert not found.left.sweeps


@given(st.integers(0, 10**6))
@settings(max_examples=12, deadline=None, derandomize=True)
def test_a_lost_node_loses_no_job(seed: int) -> None:
    chance = random.Random(seed)
    arrivals = drawn(seed, 8)
    gone = chance.uniform(0, 1500)
    changes = [NodeChange(gone, "a"), NodeChange(gone + chance.uniform(1, 2000), NODES[0])]
    found = replay(arrivals, NODES, RULES, changes=changes)
    assert_no_device_twice(found.ran)
    assert_all_trained(arrivals, found)
    assert not any(r.place.node == "a" and r.start < changes[1].at and r.end > gone + 1e-6 for r in found.ran)


@pytest.mark.slow
@given(st.integers(0, 10**6))
@settings(max_examples=12, deadline=None, derandomize=True)
def test_stops_are_allowed_and_rare(seed: int) -> None:
    arrivals = drawn(seed, 10)
    may = {arrival.sweep.name: arrival.sweep.preempt for arrival in arrivals}
    stopped: dict[tuple[str, str], float] = {}

    def watched(cluster: SharedCluster, rules: SharingRules) -> Decision:
        found = decide(cluster, rules)
        again = decide(SharedCluster.from_dict(json.loads(json.dumps(cluster.to_dict()))), rules)
        assert again == found
        for turn in found.stops:
            assert may[turn.sweep]
            last = stopped.get((turn.sweep, turn.job), -math.inf)
            assert cluster.now - last >= rules.quiet
            stopped[turn.sweep, turn.job] = cluster.now
        return found

    replay(arrivals, NODES, RULES, by=watched)


def run(
    name: str,
    *running: tuple[str, PlannedJob, Place],
    waiting: Sequence[SharedSweep] = (),
    now: float = 100.0,
    rules: SharingRules = RULES,
    preempt: bool = True,
) -> Decision:
    """The decision where one sweep runs, and others wait."""
    jobs = tuple(SharedJob(one, place=place, left=0.9) for _, one, place in running)
    own = SharedSweep(name, jobs, 0.0, 1e5, preempt=preempt)
    return decide(SharedCluster(now, NODES[:1], (own, *waiting)), rules)


LONG = job("long", 1e5, 1)
PLACES = [Place("t", 1, "a", (d,)) for d in range(4)]


def long_jobs() -> list[tuple[str, PlannedJob, Place]]:
    """Four that hold all devices of a node."""
    return [("big", dataclasses.replace(LONG, name=f"long{d}"), PLACES[d]) for d in range(4)]


def test_a_short_sweep_need_not_wait_for_a_long_one_that_may_be_stopped() -> None:
    short = sweep("short", 90.0, job("quick", 100.0, 1))
    found = run("big", *long_jobs(), waiting=[short])
    assert len(found.stops) == 1
    assert [(t.sweep, t.job) for t in found.next] == [("short", "quick")]
    assert found.next[0].place.device_ids == found.stops[0].place.device_ids
    assert run("big", *long_jobs(), waiting=[short], preempt=False).stops == ()


def test_what_is_known_of_leaving_counts_and_else_the_rules_seconds() -> None:
    short = sweep("short", 90.0, job("quick", 100.0, 1))
    one = job("long", 1000.0, 1, setup=10.0)
    for leaves_in, stops, free in ((None, 1, 105.0), (2.0, 1, 102.0), (400.0, 0, math.inf)):
        jobs = tuple(
            SharedJob(dataclasses.replace(one, name=p.node + str(p.device_ids)), place=p, leaves_in=leaves_in)
            for p in PLACES
        )
        own = SharedSweep("big", jobs, 0.0, 1e5, preempt=True)
        cluster = SharedCluster(100.0, NODES[:1], (own, short))
        assert len(decide(cluster, RULES).stops) == stops, leaves_in
        if stops:
            assert plan_together(cluster, RULES).jobs["short", "quick"].start == free


def test_who_ends_soon_is_not_stopped() -> None:
    nearly = [("big", job(f"n{d}", 40.0, 1), PLACES[d]) for d in range(4)]
    found = run("big", *nearly, waiting=[sweep("urgent", 90.0, job("quick", 1.0, 1), priority=5.0)])
    assert found.stops == ()
    assert found.starts == ()
    assert found.look_again is not None


def test_priority_goes_before_work_and_a_long_wait_before_both_of_a_priority() -> None:
    short = sweep("short", 90.0, job("quick", 10.0, 4))
    long = sweep("long", 90.0, job("slow", 9000.0, 4))
    cluster = SharedCluster(100.0, NODES[:1], (long, short))
    assert [t.sweep for t in decide(cluster, RULES).starts] == ["short"]
    urgent = dataclasses.replace(long, priority=1.0)
    assert [t.sweep for t in decide(dataclasses.replace(cluster, sweeps=(urgent, short)), RULES).starts] == [
        "long"
    ]
    starved = dataclasses.replace(long, arrived=100.0 - 5.1 * long.alone)
    assert [t.sweep for t in decide(dataclasses.replace(cluster, sweeps=(starved, short)), RULES).starts] == [
        "long"
    ]
    promised = dataclasses.replace(long, deadline=100.0 + 1.2 * long.alone)
    assert [
        t.sweep for t in decide(dataclasses.replace(cluster, sweeps=(promised, short)), RULES).starts
    ] == ["long"]


def test_who_starves_goes_before_higher_priorities() -> None:
    urgent = sweep("urgent", 90.0, job("slow", 9000.0, 4), priority=1.0)
    small = sweep("small", 0.0, job("quick", 10.0, 4))
    for waited, first in ((5.5, "urgent"), (6.5, "small")):
        now = waited * small.alone
        cluster = SharedCluster(now, NODES[:1], (urgent, dataclasses.replace(small, arrived=small.alone)))
        assert [t.sweep for t in decide(cluster, RULES).starts] == [first]
    late = dataclasses.replace(small, arrived=small.alone)
    waits = decide(SharedCluster(5.5 * small.alone, NODES[:1], (urgent, late)), RULES).look_again
    assert waits is not None
    assert waits < 5.5 * small.alone + RULES.look_every


def test_a_team_that_used_more_than_its_share_waits() -> None:
    x = sweep("x", 90.0, job("j", 100.0, 4), team="x")
    y = sweep("y", 90.0, job("j", 150.0, 4), team="y")
    cluster = SharedCluster(100.0, NODES[:1], (x, y), used={"x": 90000.0, "y": 10000.0})
    rules = SharingRules(shares={"x": 0.5, "y": 0.5})
    assert [t.sweep for t in decide(cluster, rules).starts] == ["y"]
    assert [t.sweep for t in decide(cluster, RULES).starts] == ["x"]
    assert goes_before(cluster, rules, x) == {"y": "its team used less of its share of late"}
    # What little was used says little yet.
    early = dataclasses.replace(cluster, used={"x": 900.0, "y": 100.0})
    assert [t.sweep for t in decide(early, rules).starts] == ["x"]


@pytest.mark.parametrize(("share", "seed"), [(0.7, 1), (0.3, 2), (0.5, 3)])
def test_shares_hold_over_a_long_time_where_both_teams_always_want_more(share: float, seed: int) -> None:
    chance = random.Random(seed)
    arrivals = []
    for number in range(8):
        # One team's sweeps are small, so that by the work that is left they would always go first.
        for team, size in (("x", 3000.0), ("y", 300.0)):
            count = 3 if team == "x" else 30
            jobs = [job(f"j{i}", size * chance.uniform(0.5, 1.5), 1) for i in range(count)]
            own = sweep(f"{team}{number}", 0.0, *jobs, team=team, preempt=chance.random() < 0.5)
            arrivals.append(Arrival(own))
    shares = {"x": share, "y": 1 - share}
    found = replay(arrivals, NODES[:1], SharingRules(largest_stretch=math.inf, shares=shares))
    last = {team: max(ran.end for ran in found.ran if ran.sweep[0] == team) for team in shares}
    until = 0.9 * min(last.values())
    used = {
        team: sum(max(0.0, min(r.end, until) - r.start) for r in found.ran if r.sweep[0] == team)
        for team in shares
    }
    assert until > 5 * 3600
    assert used["x"] / sum(used.values()) == pytest.approx(share, abs=0.06)


@pytest.mark.parametrize("team", ["x", "y"])
def test_nobody_starves_behind_higher_priorities_or_for_what_his_team_used(team: str) -> None:
    urgent = [
        sweep(f"u{i:03d}", 295.0 * i, job("j", 800.0, 4, setup=0.0), priority=1.0, team="x", preempt=False)
        for i in range(120)
    ]
    low = sweep("low", 100.0, job("j", 500.0, 4), team=team, preempt=False)
    rules = SharingRules(largest_stretch=5.0, shares={"x": 0.9, "y": 0.1})
    begin = SharedCluster(0.0, NODES[:1], (), used={"y": 1e6})
    found = replay([Arrival(s) for s in (*urgent, low)], NODES[:1], rules, begin=begin)
    assert (found.done["low"] - low.arrived) / low.alone < 1.2 * 5.0 + 2
    never = replay(
        [Arrival(s) for s in (*urgent, low)],
        NODES[:1],
        dataclasses.replace(rules, largest_stretch=1e9),
        begin=begin,
    )
    assert (never.done["low"] - low.arrived) / low.alone > 20, "else this test can't fail"


def test_a_wide_job_that_waits_too_long_gets_a_node_that_nobody_may_be_stopped_on() -> None:
    narrow = [sweep(f"n{i:03d}", 30.0 * i, job("j", 100.0, 1), preempt=False) for i in range(120)]
    wide = sweep("wide", 300.0, job("j", 400.0, 4), preempt=False)
    nodes = NODES[:1]
    found = replay([Arrival(s) for s in (*narrow, wide)], nodes, SharingRules(largest_stretch=5.0))
    assert (found.done["wide"] - wide.arrived) / wide.alone < 10


def test_what_the_next_sweeps_wide_job_waits_for_goes_only_to_those_who_end_before() -> None:
    # The narrow job has 90 s to go.
    running = job("narrow", 100.0, 1, setup=0.0), PLACES[0]
    wide = SharedJob(job("wide", 200.0, 4))
    jobs = SharedJob(running[0], place=running[1], left=0.9), wide
    begun = SharedSweep("first", jobs, 0.0, 100.0, priority=1.0)

    def starts(*others: PlannedJob) -> dict[str, int]:
        later = sweep("later", 50.0, *others, preempt=False)
        found = decide(SharedCluster(100.0, NODES[:1], (begun, later)), RULES)
        return {turn.job: turn.place.devices for turn in found.starts}

    assert starts(job("long", 500.0, 1)) == {}
    assert starts(job("long", 500.0, 1), job("short", 50.0, 1)) == {"short": 1}
    assert starts(*(job(f"s{n}", 50.0 + n, 1) for n in range(5))) == {"s0": 1, "s1": 1, "s2": 1}
    assert starts(job("soon on two", 120.0, 1, 2)) == {"soon on two": 2}


def test_free_devices_widen_those_who_gain() -> None:
    found = decide(SharedCluster(0.0, NODES[:2], (sweep("s", 0.0, job("j", 5000.0)),)), RULES)
    assert [t.place.devices for t in found.starts] == [4]
    # What runs is widened where that wins several times what it costs, and not near its end.
    for left, stops in ((0.9, 1), (0.01, 0)):
        one = SharedJob(job("j", 5000.0), left=left, place=PLACES[0])
        own = SharedSweep("s", (one,), 0.0, 5000.0, preempt=True)
        assert len(decide(SharedCluster(10.0, NODES[:1], (own,)), RULES).stops) == stops


def test_devices_that_strangers_hold_are_left_alone() -> None:
    cluster = SharedCluster(
        0.0, NODES[:1], (sweep("s", 0.0, job("j", 500.0)),), {("a", d): 50.0 for d in (0, 1, 2)}
    )
    (turn,) = decide(cluster, RULES).starts
    assert turn.place.device_ids == (3,)


def test_the_plan_of_all_sweeps_is_what_then_happens_where_estimates_are_right() -> None:
    sweeps = tuple(dataclasses.replace(a.sweep, arrived=0.0) for a in drawn(3, 6))
    plan = plan_together(SharedCluster(0.0, NODES, sweeps), RULES)
    found = replay([Arrival(s) for s in sweeps], NODES, RULES)
    assert plan.sweeps == pytest.approx(found.done)
    assert {key: expected.start for key, expected in plan.jobs.items() if expected.start == 0.0} == {
        (t.sweep, t.job): 0.0 for t in plan.decision.starts
    }
    assert len(plan.jobs) == sum(len(s.jobs) for s in sweeps)


def test_a_job_that_fits_on_no_node_that_is_up_waits_and_others_go_on() -> None:
    bound = sweep("bound", 0.0, job("j", 100.0, nodes=("b",)))
    other = sweep("other", 0.0, job("j", 100.0))
    plan = plan_together(SharedCluster(0.0, NODES[:1], (bound, other)), RULES)
    assert set(plan.sweeps) == {"other"}
    assert set(plan.jobs) == {("other", "j")}


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ({"checkpoint": -1.0}, "checkpoint is -1.0; give a finite number"),
        ({"largest_stretch": 0.5}, "largest_stretch is 0.5; give 1 or more"),
        ({"shares": {"x": 0.7, "y": 0.7}}, "together they are at most 1"),
        ({"look_every": 0.0}, "look_every is 0.0"),
    ],
)
def test_rules_that_cannot_be_are_refused(what: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidSweepError, match=message):
        SharingRules(**what)  # type: ignore[arg-type]
