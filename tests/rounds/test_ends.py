"""When plans may end: the law of errors, and plans that are run under it."""

from __future__ import annotations

import json
import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saturn_airflow.model.cluster import Node
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.past_errors import PastError
from saturn_airflow.model.plan import Assignment, Place, Plan
from saturn_airflow.model.problem import Option, PlannedJob, Problem
from saturn_airflow.planning.online.ends import Ends, PlanEnds, ends_of
from saturn_airflow.planning.online.error_law import ErrorLaw, Parts, fit
from saturn_airflow.planning.online.execution import Situation

EXACT = Parts(0.0, 0.0, 0.0, 0.0)


def problem(seconds: list[float], nodes: int = 1) -> Problem:
    """A job for each number of seconds, a tenth of them set-up; nodes of two devices."""
    options = [(Option("t", 1, {"gpu": s}, s / 10),) for s in seconds]
    jobs = tuple(PlannedJob(f"j{i}", option) for i, option in enumerate(options))
    return Problem("p", tuple(Node(f"n{i}", 2, "gpu") for i in range(nodes)), jobs)


def one_after_another(asked: Problem, devices: int = 1) -> Plan:
    """Jobs in turn on these devices of each node."""
    places = [(node.name, d) for node in asked.nodes for d in range(devices)]
    free = dict.fromkeys(places, 0.0)
    assigned = []
    for i, job in enumerate(asked.jobs):
        place = places[i % len(places)]
        start, free[place] = free[place], free[place] + job.options[0].seconds["gpu"]
        assigned.append(Assignment(job.name, "t", 1, place[0], (place[1],), start, free[place]))
    return Plan("p", "makespan", max(free.values()), 1.0, 0.0, tuple(assigned))


def ends(asked: Problem, plan: Plan, law: ErrorLaw, **more: object) -> PlanEnds:
    """From the beginning."""
    situation = Situation({job.name: 1.0 for job in asked.jobs})
    return ends_of(asked, plan, situation, law, **more)  # type: ignore[arg-type]


def errors(parts: Parts, sweeps: int, jobs: int, seed: int, nodes: int = 2) -> list[PastError]:
    chance = random.Random(seed)
    found = []
    for sweep in range(sweeps):
        shared = parts.bias + chance.gauss(0, parts.sweep)
        slow = [chance.gauss(0, parts.node) for _ in range(nodes)]
        for j in range(jobs):
            log = shared + slow[j % nodes] + chance.gauss(0, parts.own)
            found.append(PastError(f"s{sweep}", f"j{j}", math.exp(log), f"n{j % nodes}"))
    return found


def test_the_law_of_errors_is_found_again() -> None:
    law = fit(errors(Parts(0.1, 0.3, 0.15, 0.2), 300, 6, seed=1))
    mean = [statistics.fmean(values) for values in zip(*law.possible, strict=True)]
    assert mean == pytest.approx([0.1, 0.3, 0.15, 0.2], abs=0.04)
    assert ErrorLaw.from_dict(json.loads(json.dumps(law.to_dict()))) == law


def test_few_errors_leave_more_open_than_many() -> None:
    few, many = (fit(errors(Parts(0.0, 0.1, 0.1, 0.1), n, 4, seed=3)) for n in (2, 60))
    asked = problem([1000.0])
    wide, narrow = (ends(asked, one_after_another(asked), law).sweep for law in (few, many))
    assert wide.by(0.95) - wide.by(0.05) > 1.2 * (narrow.by(0.95) - narrow.by(0.05))


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(1.0, 1e4), min_size=1, max_size=8), st.integers(1, 2), st.integers(1, 2))
def test_exact_estimates_end_as_planned(seconds: list[float], nodes: int, devices: int) -> None:
    asked = problem(seconds, nodes)
    plan = one_after_another(asked, devices)
    found = ends(asked, plan, ErrorLaw((EXACT,)), draws=3)
    assert found.sweep.drawn == pytest.approx([plan.makespan] * 3)
    assert {job: e.median for job, e in found.jobs.items()} == pytest.approx(
        {a.job: a.end for a in plan.assignments}
    )


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.floats(1.0, 1e4), min_size=1, max_size=8),
    st.floats(-0.5, 0.5),
    st.floats(0.0, 0.5),
    st.floats(0.0, 0.5),
    st.floats(0.0, 30.0),
)
def test_a_worse_law_never_ends_earlier(
    seconds: list[float], bias: float, sweep: float, own: float, gap: float
) -> None:
    asked = problem(seconds, nodes=2)
    plan = one_after_another(asked)
    law = ErrorLaw((Parts(bias, sweep, 0.0, own),), gaps=(0.0,))
    later = ErrorLaw((Parts(bias + 0.1, sweep, 0.0, own),), gaps=(gap,))
    first, second = (ends(asked, plan, one, draws=9) for one in (law, later))
    assert all(a <= b + 1e-6 for a, b in zip(first.sweep.drawn, second.sweep.drawn, strict=True))
    assert list(first.sweep.drawn) == sorted(first.sweep.drawn)
    assert all(e.by(0.9) <= first.sweep.by(0.9) + 1e-6 for e in first.jobs.values())


def test_what_jobs_share_widens_a_sweep_and_what_they_do_not_evens_out() -> None:
    asked = problem([100.0] * 16)
    plan = one_after_another(asked)
    shared, own = (
        ends(asked, plan, ErrorLaw((parts,))).sweep
        for parts in (Parts(0.0, 0.2, 0.0, 0.0), Parts(0.0, 0.0, 0.0, 0.2))
    )
    assert shared.by(0.9) - shared.by(0.1) > 2.5 * (own.by(0.9) - own.by(0.1))


def test_a_slow_node_delays_all_of_its_jobs_and_no_other() -> None:
    asked = problem([100.0] * 4, nodes=2)
    plan = one_after_another(asked)
    law = ErrorLaw((Parts(0.0, 0.0, 0.5, 0.0),))
    (only,) = (ends(asked, plan, law, draws=1).jobs,)
    by_node = {node: [a.job for a in plan.assignments if a.node == node] for node in ("n0", "n1")}
    firsts = [only[jobs[0]].median for jobs in by_node.values()]
    assert [only[jobs[1]].median for jobs in by_node.values()] == pytest.approx([2 * f for f in firsts])
    assert firsts[0] != pytest.approx(firsts[1])


def test_gaps_count_at_each_launch_and_running_jobs_are_sure_where_they_were_seen() -> None:
    asked = problem([100.0, 100.0])
    plan = one_after_another(asked)
    gaps = ErrorLaw((EXACT,), gaps=(7.0,))
    assert ends(asked, plan, gaps, draws=3).sweep.median == pytest.approx(214.0)
    runs = Situation({"j0": 0.5, "j1": 1.0}, {"j0": Place("t", 1, "n0", (0,))})
    late = ErrorLaw((Parts(math.log(2), 0.0, 0.0, 0.0),))
    unseen = ends_of(asked, plan, runs, late, draws=1).jobs
    assert unseen["j0"].median == pytest.approx(90.0)
    assert unseen["j1"].median == pytest.approx(290.0)
    seen = ends_of(asked, plan, runs, late, seen=["j0"], draws=1).jobs
    assert seen["j0"].median == pytest.approx(45.0)
    assert seen["j1"].median == pytest.approx(145.0)  # the bias is in what is expected of it by now


def test_rare_ends_need_more_draws() -> None:
    assert Ends((1.0, 2.0, 3.0)).by(0.75) == 3.0
    assert Ends((1.0, 2.0, 3.0)).by(0.99) == math.inf
    assert Ends((1.0, 2.0, 3.0)).odds(2.0) == 0.5
    with pytest.raises(InvalidSweepError, match=r"confidence is 1\.5"):
        Ends((1.0,)).by(1.5)
    asked = problem([1.0])
    with pytest.raises(InvalidSweepError, match="draws is 0"):
        ends(asked, one_after_another(asked), ErrorLaw((EXACT,)), draws=0)


@pytest.mark.parametrize(
    ("past", "message"),
    [
        ([PastError("s", "j", 1.1)] * 9, "9 jobs of 1 earlier sweep are too few"),
        ([PastError("s", "j", 1.1), PastError("t", "j", 0.0)], r"took 0\.0 times its estimate"),
    ],
)
def test_errors_that_say_nothing_are_refused(past: list[PastError], message: str) -> None:
    with pytest.raises(InvalidSweepError, match=message):
        fit(past)
