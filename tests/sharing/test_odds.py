"""Promises with odds: what earlier errors say of the ends to come."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from saturn_airflow.model.cluster import Node
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.plan import Place
from saturn_airflow.model.problem import Option, PlannedJob
from saturn_airflow.model.sharing import SharedCluster, SharedJob, SharedSweep, SharingRules
from saturn_airflow.sharing.error_law import ErrorLaw, PastError, fit
from saturn_airflow.sharing.odds import Ends, odds

NODES = (Node("a", 1, "gpu"),)
RULES = SharingRules()
JOB = PlannedJob("j", (Option("t", 1, {"gpu": 1000.0}),))


def cluster(job: SharedJob) -> SharedCluster:
    """One job on one device."""
    return SharedCluster(50.0, NODES, (SharedSweep("s", (job,), 0.0, 1000.0),))


def test_the_law_of_errors_is_found_again() -> None:
    chance = random.Random(1)
    past = []
    for sweep in range(400):
        shared = 0.1 + chance.gauss(0, 0.3)
        past += [PastError(f"s{sweep}", f"j{j}", math.exp(shared + chance.gauss(0, 0.2))) for j in range(4)]
    law = fit(past)
    assert law.bias == pytest.approx(0.1, abs=0.05)
    assert law.sweep == pytest.approx(0.3, rel=0.1)
    assert math.hypot(law.job, law.strategy) == pytest.approx(0.2, rel=0.1)


def test_ends_are_those_of_the_law_where_one_job_is_all_there_is() -> None:
    law = ErrorLaw(bias=0.2, sweep=0.2, job=0.1, strategy=0.1)
    found = odds(cluster(SharedJob(JOB)), RULES, law, draws=399)
    spread = math.sqrt(0.06)
    ends = found.sweeps["s"]
    assert ends.median == pytest.approx(50 + 1000 * math.exp(0.2), rel=0.05)
    assert ends.by(0.9) == pytest.approx(50 + 1000 * math.exp(0.2 + 1.2816 * spread), rel=0.06)
    assert ends.odds(ends.by(0.9)) == pytest.approx(0.9, abs=0.01)
    assert found.jobs["s", "j"] == ends
    assert odds(cluster(SharedJob(JOB)), RULES, law, draws=399) == found


def test_what_was_seen_to_run_is_sure_and_a_few_errors_leave_more_open_than_many() -> None:
    runs = SharedJob(JOB, left=0.5, place=Place("t", 1, "a", (0,)))
    law = ErrorLaw(0.2, 0.2, 0.1, 0.1)
    sure = odds(cluster(runs), RULES, law, seen=[("s", "j")]).sweeps["s"]
    assert sure.drawn == pytest.approx([550.0] * 59)
    many = odds(cluster(runs), RULES, law).sweeps["s"]
    few = odds(cluster(runs), RULES, replace(law, sweeps=3.0, jobs=6.0)).sweeps["s"]
    assert few.by(0.9) - few.by(0.1) > 1.2 * (many.by(0.9) - many.by(0.1))


def test_what_fits_nowhere_has_no_end_and_rare_ends_need_more_draws() -> None:
    wide = replace(JOB, options=(Option("t", 2, {"gpu": 10.0}),))
    found = odds(cluster(SharedJob(wide)), RULES, ErrorLaw(0, 0.1, 0.1, 0.1), draws=3)
    assert found.sweeps["s"].by(0.5) == math.inf
    assert Ends((1.0, 2.0, 3.0)).by(0.75) == 3.0
    assert Ends((1.0, 2.0, 3.0)).by(0.99) == math.inf
    with pytest.raises(InvalidSweepError, match=r"confidence is 1\.5"):
        Ends((1.0,)).by(1.5)


@pytest.mark.parametrize(
    ("past", "message"),
    [
        ([PastError("s", "j", 1.1)] * 9, "9 errors of 1 sweeps are too few"),
        ([PastError("s", "j", 1.1), PastError("t", "j", 0.0)], r"took 0\.0 times its estimate"),
    ],
)
def test_errors_that_say_nothing_are_refused(past: list[PastError], message: str) -> None:
    with pytest.raises(InvalidSweepError, match=message):
        fit(past)
