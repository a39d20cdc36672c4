"""Which rounds still stand when one is planned, and which finished jobs are to be trained again."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowRescheduleException

from saturn_airflow import Job, Node
from saturn_airflow.launch import progress, restarting, runs
from saturn_airflow.model.problem import Option, PlannedJob, Problem
from saturn_airflow.operators import round_outcomes
from saturn_airflow.operators.context import SweepContext
from saturn_airflow.operators.round_outcomes import now_after, progress_of, standing_plans

FIRST, SECOND = 100.0, 200.0
NODE = Node("n", 1, kind="cpu")
PROBLEM = Problem("p", (NODE,), (PlannedJob("a", (Option("single", 1, {"cpu": 1.0}),), None),))


def test_what_was_skipped_after_the_first_plan_was_made_anew_does_not_stand() -> None:
    made = {"one": SECOND, "two": FIRST, "three": None, "four": SECOND + 1}
    ti = SimpleNamespace(xcom_pull=lambda task_ids, key, map_indexes: made[task_ids])
    assert standing_plans(ti, ["one", "two", "three", "four"]) == [SECOND, SECOND + 1]
    assert standing_plans(ti, ["three"]) == []


def test_a_round_that_is_planned_as_the_clock_was_set_back_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: SECOND)
    assert now_after([]) == now_after([FIRST]) == SECOND
    monkeypatch.setattr(time, "time", lambda: FIRST)
    third = now_after([FIRST, SECOND])
    made = {"one": FIRST, "two": SECOND, "three": third}
    ti = SimpleNamespace(xcom_pull=lambda task_ids, key, map_indexes: made[task_ids])
    assert standing_plans(ti, list(made)) == [FIRST, SECOND, third]
    assert third > SECOND, "the last outcome of a job is that of the last round"


@pytest.mark.parametrize(("concluded", "finished"), [(FIRST, True), (SECOND, False), (None, True)])
def test_a_job_that_finished_in_a_round_that_is_planned_anew_is_planned_again(
    tmp_path: Path, concluded: float | None, finished: bool
) -> None:
    sweep = SweepContext("d", "r", "s", tmp_path)
    path = sweep.job_folder("a") / "runs" / "0001"
    path.mkdir(parents=True)
    job = Job("a", load_model="m:f", load_dataloader="d:f")
    spec = runs.RunSpec(
        job=job, technique="single", folder="f", node="n", slots=1, devices=1, priority=(FIRST, 0)
    )
    (path / "spec.json").write_text(json.dumps(spec.to_dict()))
    (path / "alive").touch()
    end: dict[str, Any] = {"event": "end", "status": "finished", "reason": "", "time": 1.0, "result": {}}
    (path / "events.jsonl").write_text(json.dumps(end) + "\n")
    if concluded is not None:
        restarting.conclude(runs.Run(path), restarting.Asker(concluded))
    so_far = progress_of(sweep, PROBLEM, [FIRST])["a"]
    assert (so_far.status == "finished") == finished


def test_a_plan_waits_for_a_folder_that_does_not_answer_and_holds_no_process_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers, stands_still = progress.Progress(steps=3), threading.Event()
    monkeypatch.setattr(progress, "of", lambda folder: stands_still.wait(60) and answers)
    sweep = SweepContext("d", "r", "s", tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(round_outcomes, "_ANSWER_SECONDS", 0.01)
        with pytest.raises(AirflowRescheduleException):
            progress_of(sweep, PROBLEM, [FIRST])
    assert f"How far a is can't be read: {sweep.job_folder('a')} does not answer" in caplog.text
    stands_still.set()
    assert progress_of(sweep, PROBLEM, [FIRST]) == {"a": answers}
