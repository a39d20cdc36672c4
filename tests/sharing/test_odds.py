"""Promises with odds: what earlier errors say of the ends to come."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from saturn_airflow.model.cluster import Node
from saturn_airflow.model.plan import Place
from saturn_airflow.model.problem import Option, PlannedJob
from saturn_airflow.model.sharing import SharedCluster, SharedJob, SharedSweep, SharingRules
from saturn_airflow.planning.online.error_law import ErrorLaw, Parts
from saturn_airflow.sharing.drawn_futures import odds

NODES = (Node("a", 1, "gpu"),)
RULES = SharingRules()
JOB = PlannedJob("j", (Option("t", 1, {"gpu": 1000.0}),))


def cluster(job: SharedJob) -> SharedCluster:
    """One job on one device."""
    return SharedCluster(50.0, NODES, (SharedSweep("s", (job,), 0.0, 1000.0),))


def test_ends_are_those_of_the_law_where_one_job_is_all_there_is() -> None:
    law = ErrorLaw((Parts(bias=0.2, sweep=0.2, node=0.1, own=0.1),))
    found = odds(cluster(SharedJob(JOB)), RULES, law, draws=399)
    spread = math.sqrt(0.06)
    ends = found.sweeps["s"]
    assert ends.median == pytest.approx(50 + 1000 * math.exp(0.2), rel=0.05)
    assert ends.by(0.9) == pytest.approx(50 + 1000 * math.exp(0.2 + 1.2816 * spread), rel=0.06)
    assert ends.odds(ends.by(0.9)) == pytest.approx(0.9, abs=0.01)
    assert found.jobs["s", "j"] == ends
    assert odds(cluster(SharedJob(JOB)), RULES, law, draws=399) == found


def test_what_was_seen_to_run_is_sure_and_several_possible_laws_leave_more_open() -> None:
    runs = SharedJob(JOB, left=0.5, place=Place("t", 1, "a", (0,)))
    one, other = Parts(0.2, 0.2, 0.1, 0.1), Parts(0.5, 0.4, 0.2, 0.2)
    sure = odds(cluster(runs), RULES, ErrorLaw((one,)), seen=[("s", "j")]).sweeps["s"]
    assert sure.drawn == pytest.approx([550.0] * 59)
    many = odds(cluster(runs), RULES, ErrorLaw((one,))).sweeps["s"]
    few = odds(cluster(runs), RULES, ErrorLaw((one, other))).sweeps["s"]
    assert few.by(0.9) - few.by(0.1) > 1.2 * (many.by(0.9) - many.by(0.1))


def test_each_sweep_has_the_errors_of_its_own_law() -> None:
    exact, late = ErrorLaw((Parts(0.0, 0.0, 0.0, 0.0),)), ErrorLaw((Parts(math.log(2), 0.0, 0.0, 0.0),))
    two = SharedCluster(
        0.0,
        (Node("a", 2, "gpu"),),
        tuple(SharedSweep(name, (SharedJob(JOB),), 0.0, 1000.0) for name in ("s", "t")),
    )
    found = odds(two, RULES, {"s": exact, "t": late}, draws=3).sweeps
    assert (found["s"].median, found["t"].median) == pytest.approx((1000.0, 2000.0))


def test_what_fits_nowhere_has_no_end() -> None:
    wide = replace(JOB, options=(Option("t", 2, {"gpu": 10.0}),))
    law = ErrorLaw((Parts(0, 0.1, 0.1, 0.1),))
    found = odds(cluster(SharedJob(wide)), RULES, law, draws=3)
    assert found.sweeps["s"].by(0.5) == math.inf
