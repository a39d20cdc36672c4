"""Ends with odds in sweeps: what is kept of a night's errors, and what the nights after make of it."""

from __future__ import annotations

import math
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from saturn_airflow import tracking
from saturn_airflow.model.entries import PlanEntry, Strategy
from saturn_airflow.model.estimates import Estimate, Source
from saturn_airflow.model.jobs import HParams, Job
from saturn_airflow.model.outcomes import Outcome
from saturn_airflow.model.past_errors import PastError
from saturn_airflow.operators import promises
from saturn_airflow.operators.promises import (
    Experience,
    asked_in,
    became,
    errors_of,
    in_words,
    odds_of,
    told,
)
from saturn_airflow.operators.report_table import table
from saturn_airflow.planning.online.ends import Ends, PlanEnds
from saturn_airflow.planning.online.error_law import ErrorLaw, Parts
from saturn_airflow.tracking import error_history

MADE = 1000.0


def entry(name: str, **fields: Any) -> PlanEntry:
    job = Job(
        name,
        load_model="shop.models:m",
        load_dataloader="shop.data:d",
        loss_function="shop.models:loss",
        hparams=HParams(epochs=1),
    )
    usual = {"technique": "single", "devices": 1, "node": "n", "device_ids": (0,), "kind": "cpu"}
    usual |= {"start": 0.0, "end": 100.0, "fingerprint": "f", "attempt": MADE, "position": 0}
    return PlanEntry(job=job, **{**usual, **fields})


def outcome(name: str, began: float, ended: float, **fields: Any) -> Outcome:
    usual = {"job": name, "status": "finished", "technique": "single", "devices": 1, "node": "n"}
    usual |= {"planned_seconds": 100.0, "started_at": MADE + began, "ended_at": MADE + ended}
    usual |= {"actual_seconds": ended - began, "seconds_per_batch": 1.0, "batches": 9, "steps": 9}
    return Outcome.from_dict({**usual, **fields})


def test_errors_are_those_of_jobs_that_ran_in_one_go_under_a_strategy_that_was_estimated() -> None:
    entries = [
        entry("first"),
        entry("then", after=("first",), start=100.0, end=200.0),
        entry("narrow", strategies=(Strategy(technique="ddp", devices=2, seconds=50.0),)),
        entry("other"),
        entry("resumed"),
        entry("ended early"),
        entry("failed"),
    ]
    outcomes = [
        outcome("first", 5.0, 155.0),
        outcome("then", 158.0, 248.0),
        outcome("narrow", 0.0, 60.0, technique="ddp", devices=2),
        outcome("other", 0.0, 60.0, technique="fsdp", devices=2),
        outcome("resumed", 0.0, 60.0, batches=4),
        outcome("ended early", 0.0, 60.0, reason="ended at epoch 3"),
        outcome("failed", 0.0, 60.0, status="failed"),
        outcome("unplanned", 0.0, 60.0),
    ]
    found = errors_of("s", outcomes, {e.name: e for e in entries})
    assert found == [
        PastError("s", "first", 1.5, "n", 5.0),
        PastError("s", "then", 0.9, "n", 3.0),
        PastError("s", "narrow", 1.2, "n", 0.0),
    ]


def test_what_first_jobs_waited_for_airflow_is_told_by_those_that_began_with_the_plan() -> None:
    entries = [
        entry("one", start=2.0, end=102.0),
        entry("two", start=2.0, end=102.0),
        entry("three", start=2.0, end=102.0),
        entry("then", after=("one",), start=102.0, end=202.0),
        entry("waits for another sweep", start=40.0, end=140.0),
        entry("failed", start=2.0, end=102.0),
    ]
    by_name = {e.name: e for e in entries}
    began = {"one": 1.5, "two": 3.5, "three": 1.25, "then": 107.0, "waits for another sweep": 45.0}
    outcomes = [outcome(name, at, at + 100.0) for name, at in began.items()]
    outcomes.append(outcome("failed", 90.0, 91.0, status="failed"))
    assert asked_in(outcomes, by_name, 2.0) == 1.5
    assert asked_in(outcomes, by_name) is None
    assert asked_in([outcome("one", -5.0, 95.0)], by_name, 2.0) == 0.0, "clocks differ"


def sweep_with_errors(
    folder: Path, dag: str, run: str, fresh: bool, factors: list[float], asked_in: float | None = None
) -> str:
    uri = f"sqlite:///{folder}/mlflow.db"
    key = f"{dag}/{run}/sweep"
    tags = {"saturn.sweep": key, "airflow.dag_id": dag}
    sweep = tracking.open_sweep(uri, dag, run, tags, {}, folder / dag / run)
    errors = [PastError(key, f"j{i}", factor, f"n{i % 2}", 2.5) for i, factor in enumerate(factors)]
    sweep.tag(error_history.tag(errors, fresh, asked_in))
    assert sweep.close("finished")
    return uri


def estimates(source: Source) -> list[Estimate]:
    return [Estimate(fingerprint="f", technique="single", devices=1, kind="cpu", source=source)]


@pytest.mark.slow
def test_later_nights_know_the_errors_of_those_that_were_estimated_alike(tmp_path: Path) -> None:
    uri = sweep_with_errors(tmp_path, "nightly", "mon", True, [2.0, 2.2, 1.9])

    def experience(source: Source, dag: str = "nightly", key: str = "tonight") -> Experience:
        return Experience.of(uri, dag, key, estimates(source))

    first = experience("history")
    assert (first.fresh, first.law) == (False, None)
    assert "no earlier sweep says yet" in str(first.why)
    assert first.asks_in == promises.ASKS_IN
    for run, seconds in (("tue", None), ("wed", 3.25)):
        sweep_with_errors(tmp_path, "nightly", run, False, [1.1, 1.2, 0.9], seconds)
    assert [experience(source).asks_in for source in ("history", "measured")] == [3.25, 3.25]
    law = experience("history").law
    assert law is not None
    assert (law.errors, law.sweeps, set(law.gaps)) == (6, 2, {2.5})
    # Errors of trials, of one sweep only, say nothing yet; nor do those of a sweep that is planned anew.
    assert "3 jobs of 1 earlier sweep are too few" in str(experience("measured").why)
    assert experience("history", key="nightly/wed/sweep").law is None
    # A DAG without sweeps of its own begins with what all others say.
    other = experience("history", dag="weekly").law
    assert other is not None
    assert other.errors == 6
    assert experience("history", dag="weekly").asks_in == 3.25
    sweep_with_errors(tmp_path, "weekly", "mon", True, [1.0], 0.5)
    assert experience("history", dag="weekly").asks_in == 0.5, "its own tells more"


@pytest.mark.slow
def test_damaged_errors_are_left_out_and_more_than_fit_are_not_kept(tmp_path: Path) -> None:
    uri = sweep_with_errors(tmp_path, "nightly", "mon", False, [1.5] * 400)
    for number, text in enumerate(
        [
            "{",
            "[]",
            '{"fresh":true,"nodes":[],"errors":[],"asked_in":-1}',
            '{"fresh":true,"nodes":[],"errors":[[0,0.1,0]]}',
        ]
    ):
        tags = {"saturn.sweep": f"nightly/{number}/sweep", error_history.ERRORS_TAG: text}
        tracking.open_sweep(uri, "nightly", str(number), tags, {}, tmp_path / str(number)).close()
    (found,) = error_history.find(uri)
    assert len(found.errors) == error_history.MOST_ERRORS
    assert found.errors[0].factor == pytest.approx(1.5, rel=1e-3)


def test_where_mlflow_is_away_nothing_is_promised_and_it_is_asked_once() -> None:
    with socket.socket() as listener:  # takes what is asked, and hangs up
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(60)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        asked = []

        def hang_up() -> None:
            while True:
                connection, _ = listener.accept()
                with connection:
                    if not (text := connection.recv(1000)):
                        return
                    asked.append(text)

        thread = threading.Thread(target=hang_up)
        thread.start()
        found = Experience.of(url, "nightly", "tonight", estimates("history"))
        socket.create_connection(listener.getsockname()).close()
        thread.join()
    assert found.law is None
    assert found.why is not None
    assert "MLflow, which has how far earlier estimates were off, does not answer (no answer" in found.why
    assert len(asked) == 1


def test_a_promise_says_by_when_and_the_report_whether_it_was_kept() -> None:
    law = ErrorLaw((Parts(0.0, 0.0, 0.0, 0.0),), errors=7, sweeps=3)
    ends = PlanEnds(Ends(tuple(map(float, range(101, 200)))), {"a": Ends(tuple(map(float, range(1, 100))))})
    promise = told(Experience(False, law, None), ends, 0.9)
    assert promise == {
        "confidence": 0.9,
        "fresh": False,
        "seconds": 190.0,
        "median": 150.0,
        "jobs": {"a": 90.0},
        "errors": 7,
        "sweeps": 3,
    }
    assert odds_of(ends, 150.0) == 0.5
    assert "Done in 190 s with odds of 90%" in in_words(promise, 0.5)
    assert "the deadline is kept with odds of 50%" in in_words(promise, 0.5)
    for end, kept, words in ((185.0, True, "kept (185.0 s)"), (195.0, False, "NOT KEPT (195.0 s)")):
        outcomes = [outcome("a", 0.0, end)]
        found = became(promise, MADE, outcomes)
        assert (found["kept"], "jobs" in found) == (kept, False)
        assert words in table({"best": None, "promise": found}, outcomes)
    assert became(promise, MADE, [outcome("a", 0.0, 10.0, status="failed")])["kept"] is None


def test_where_nothing_is_known_that_is_said() -> None:
    unknown = told(Experience(True, None, "0 errors are too few"), None, 0.9)
    assert unknown == {"confidence": 0.9, "fresh": True, "why": "0 errors are too few"}
    assert in_words(unknown, None) == "Nothing is promised of the end: 0 errors are too few"
    assert became(unknown, MADE, []) == unknown
    assert odds_of(None, 10.0) is None
    assert "NOT KEPT" not in table({"best": None, "promise": unknown}, [outcome("a", 0.0, 1.0)])
    assert math.isclose(Ends((5.0,)).since(2.0).median, 3.0)
