"""Deadlines among several sweeps: they are kept as long as they can be, and it is known who breaks one."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from saturn_airflow.model.cluster import Node
from saturn_airflow.model.plan import Place
from saturn_airflow.model.problem import Option, PlannedJob
from saturn_airflow.model.sharing import SharedCluster, SharedJob, SharedSweep, SharingRules, least_seconds
from saturn_airflow.sharing import turns
from saturn_airflow.sharing.broken_deadlines import late
from saturn_airflow.sharing.forecast import plan_together
from saturn_airflow.sharing.ranking import ways_on
from saturn_airflow.sharing.turns import decide

NODE = Node("n", 2, "cpu")
RULES = SharingRules()


def job(name: str, seconds: float, *widths: int, nodes: tuple[str, ...] = ("n",)) -> PlannedJob:
    """A job of so many seconds on one device."""
    return PlannedJob(name, tuple(Option("t", w, {"cpu": seconds / w**0.8}) for w in widths or (1,)), nodes)


def sweep(name: str, *jobs: PlannedJob | SharedJob, **facts: object) -> SharedSweep:
    shared = tuple(one if isinstance(one, SharedJob) else SharedJob(one) for one in jobs)
    return SharedSweep(name, shared, **{"arrived": 0.0, "alone": 1000.0, **facts})  # type: ignore[arg-type]


def running(device: int, seconds: float) -> SharedJob:
    return SharedJob(job(f"r{device}", seconds), place=Place("t", 1, "n", (device,)))


def test_who_has_less_to_do_does_not_take_the_device_that_a_deadline_needs() -> None:
    """Its work is less, and it would have the only device for too long."""
    one = Node("n", 1, "cpu")
    due = sweep("due", *(job(f"j{n}", 100) for n in range(3)), deadline=480.0)
    cluster = SharedCluster(0.0, (one,), (due, sweep("other", job("long", 250))))
    ends = plan_together(cluster, RULES).sweeps
    assert ends == {"due": 300.0, "other": 550.0}
    without = replace(cluster, sweeps=(replace(due, deadline=None), cluster.sweeps[1]))
    assert plan_together(without, RULES).sweeps["other"] == 250.0, "without a deadline it goes first"


def test_a_deadline_that_presses_chooses_how_wide_a_job_runs() -> None:
    """Thriftily it would end after it."""
    due = sweep("due", job("j", 100, 1, 2), deadline=70.0)
    others = tuple(sweep(f"s{n}", job("j", 500), priority=-1.0) for n in range(8))
    (turn,) = decide(SharedCluster(0.0, (NODE,), (due, *others)), RULES).starts
    assert (turn.sweep, turn.place.devices) == ("due", 2)
    relaxed = replace(due, deadline=1e6)
    starts = decide(SharedCluster(0.0, (NODE,), (relaxed, *others)), RULES).starts
    assert {turn.place.devices for turn in starts} == {1}


def test_it_is_known_who_breaks_a_deadline_and_who_does_not() -> None:
    runs = sweep("runs", running(0, 60), running(1, 60), arrived=-10.0)
    due = sweep("due", job("a", 100), job("b", 100), deadline=250.0)
    harmless = sweep("harmless", job("x", 150), arrived=5.0)
    cluster = SharedCluster(0.0, (NODE,), (runs, due, harmless))
    assert late(cluster, RULES) == []
    urgent = sweep("urgent", job("x", 150), job("y", 150), priority=1.0, arrived=6.0)
    (found,) = late(replace(cluster, sweeps=(*cluster.sweeps, urgent)), RULES)
    assert (found.sweep, found.deadline, found.end) == ("due", 250.0, 310.0)
    assert found.without["urgent"] == 160.0
    assert "harmless" not in found.without
    (found,) = late(replace(cluster, sweeps=(*cluster.sweeps, urgent)), RULES, suspects={"harmless"})
    assert found.without == {}


def test_what_is_late_by_itself_is_nobodys_doing_and_what_has_passed_is_no_news() -> None:
    due = sweep("due", job("a", 100), deadline=50.0)
    other = sweep("other", job("x", 10))
    (found,) = late(SharedCluster(0.0, (NODE,), (due, other)), RULES)
    assert found.without == {}
    assert late(SharedCluster(60.0, (NODE,), (due, other)), RULES) == []


def _drawn(chance: random.Random, name: str, nodes: tuple[Node, ...], **facts: object) -> SharedSweep:
    jobs = []
    for number in range(chance.randint(1, 4)):
        node = chance.choice(nodes)
        widths = chance.choice([(1,), (1, 2)]) if node.devices > 1 else (1,)
        jobs.append(job(f"j{number}", chance.lognormvariate(5, 1), *widths, nodes=(node.name,)))
    return sweep(name, *jobs, alone=least_seconds(tuple(jobs), nodes), **facts)


@pytest.mark.parametrize("seed", range(30))
def test_who_comes_later_breaks_no_deadline_that_was_kept_unless_he_goes_first(seed: int) -> None:
    chance = random.Random(seed)
    nodes = tuple(Node(f"n{i}", chance.choice((1, 2, 4)), "cpu") for i in range(chance.choice((1, 2))))
    devices = [(node.name, device) for node in nodes for device in range(node.devices)]
    runs = [
        SharedJob(
            job(f"{name}-{device}", chance.uniform(10, 300), nodes=(name,)),
            place=Place("t", 1, name, (device,)),
        )
        for name, device in devices
        if chance.random() < 0.7
    ]
    before = [sweep("runs", *runs, arrived=-10.0)] if runs else []
    before += [_drawn(chance, f"before{n}", nodes, arrived=-5.0) for n in range(chance.randint(0, 2))]
    due = _drawn(chance, "due", nodes, arrived=-1.0, deadline=1e9)
    kept = plan_together(SharedCluster(0.0, nodes, (*before, due)), RULES).sweeps["due"]
    due = replace(due, deadline=kept * chance.choice((1.02, 1.1, 1.3)))
    assert not late(SharedCluster(0.0, nodes, (*before, due)), RULES)
    later = [_drawn(chance, f"later{n}", nodes) for n in range(chance.randint(1, 4))]
    assert not late(SharedCluster(0.0, nodes, (*before, due, *later)), RULES)


def test_what_a_decision_costs_does_not_grow_with_the_square_of_those_whose_deadline_presses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Devices are kept for each of them, and none has any to keep."""
    looked = 0

    def counted(*which: Any) -> Any:
        nonlocal looked
        looked += 1
        return ways_on(*which)

    monkeypatch.setattr(turns, "ways_on", counted)
    costs = []
    for count in (40, 80):
        sweeps = [sweep(f"s{n}", job("a", 100), job("b", 100), deadline=150.0) for n in range(count)]
        looked = 0
        decide(SharedCluster(0.0, (NODE,), tuple(sweeps)), RULES)
        costs.append(looked)
    assert costs[1] <= 2.5 * costs[0]
