"""Nodes whose clocks differ from that of who plans: what ends rounds, and when jobs began and ended."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import DAG
from airflow.sdk.exceptions import AirflowSkipException

from saturn_airflow import Cluster, HParams, Job, Node
from saturn_airflow.launch.runs import RunSpec
from saturn_airflow.model.entries import PlanEntry
from saturn_airflow.model.outcomes import Outcome, TrainedSpeed
from saturn_airflow.model.rounds import Rounds
from saturn_airflow.model.settings import SweepSettings
from saturn_airflow.operators import making_claims, report_task
from saturn_airflow.operators.context import SweepContext
from saturn_airflow.operators.live import Live
from saturn_airflow.operators.report_task import ReportOperator
from saturn_airflow.operators.round_train import RoundTrainOperator
from saturn_airflow.operators.shared_clock import PlansClock, ahead_of, ahead_of_plan
from saturn_airflow.operators.train_task import TrainOperator

NODE = Node("n", 1, kind="cpu")
JOB = Job("a", load_model="m:f", load_dataloader="d:f", hparams=HParams(batches=20))
NOW = time.time


@pytest.fixture(params=[420.0, -420.0])
def ahead(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> float:
    """By how many seconds this node's clock is ahead of that of the disk, by which was planned."""
    seconds: float = request.param
    monkeypatch.setenv("AIRFLOW__SATURN__HOME", str(tmp_path))
    monkeypatch.setattr(time, "time", lambda: NOW() + seconds)
    return seconds


def operator_of(**fields: Any) -> RoundTrainOperator:
    usual: dict[str, Any] = {"technique": "single", "devices": 1, "node": "n", "device_ids": (0,)}
    place: dict[str, Any] = {"start": 0.0, "end": 100.0, "kind": "cpu", "attempt": NOW(), "position": 0}
    fields = {"ahead": 0.0, **fields}
    entry = PlanEntry(
        job=JOB, fingerprint="f", round=1, planned_makespan=100.0, batches=20, **usual, **place, **fields
    )
    settings = SweepSettings(cluster=Cluster(NODE), group="s", rounds=Rounds(most=2, off_by=0.1))
    node = {"name": "n", "devices": 1, "kind": "cpu"}
    return RoundTrainOperator(task_id="t", entry=entry.to_dict(), node=node, settings=settings)


def context() -> Any:
    ti = SimpleNamespace(
        dag_id="d", run_id="r", task_id="t", map_index=0, try_number=1, max_tries=9, xcom_push=lambda *_: None
    )
    return {"ti": ti}


@pytest.mark.parametrize("in_seconds", [60.0, -60.0])
def test_a_round_ends_by_the_clock_of_its_plan(
    ahead: float, in_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainOperator, "execute", lambda *_: {})
    monkeypatch.setattr(RoundTrainOperator, "_skip_watch", lambda *_: None)
    operator = operator_of(ends_at=NOW() + in_seconds)
    if in_seconds < 0:
        with pytest.raises(AirflowSkipException):
            operator.execute(context())
        return
    operator.execute(context())
    assert not operator.must_let_go()


def test_a_clock_that_differs_is_no_job_that_strays(
    ahead: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainOperator, "execute", lambda *_: {})
    monkeypatch.setattr(RoundTrainOperator, "_skip_watch", lambda *_: None)
    operator = operator_of()
    operator.execute(context())
    for step in range(1, 12):
        operator.watch({"event": "step", "step": step, "eta_seconds": 100.0, "time": time.time()})
    assert not operator._is_round_over()


@pytest.mark.parametrize("jump", [3600.0, -3600.0, -86400.0])
def test_a_clock_that_is_set_while_a_job_trains_ends_no_round_and_keeps_none(
    jump: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__SATURN__HOME", str(tmp_path))
    monkeypatch.setattr(TrainOperator, "execute", lambda *_: {})
    monkeypatch.setattr(RoundTrainOperator, "_skip_watch", lambda *_: None)
    operators = [operator_of(ends_at=NOW() + seconds) for seconds in (600.0, 1.0)]
    for operator in operators:
        operator.execute(context())
        assert not operator.must_let_go()
    monkeypatch.setattr(time, "time", lambda: NOW() + jump)
    time.sleep(1.0)
    assert [operator.must_let_go() for operator in operators] == [False, True]
    for step in range(1, 12):
        operators[0].watch({"event": "step", "step": step, "eta_seconds": 100.0, "time": time.time()})
    assert not operators[0]._is_round_over()


def test_pages_are_told_of_progress_by_the_clock_of_the_plan(ahead: float, tmp_path: Path) -> None:
    live = Live(lambda told: None, {}, clock=PlansClock(tmp_path, 0.0))
    live.hear([{"event": "step", "step": 1, "epoch": 0, "loss": 1.0, "time": time.time()}])
    assert live.told()["now"]["time"] == pytest.approx(NOW(), abs=2.0)


def test_what_others_and_reports_are_told_is_by_one_clock(ahead: float, tmp_path: Path) -> None:
    """All who wait at a node go by its clock; the report goes by that of the plan."""
    sweep = SweepContext.of(context(), "s")
    operator = operator_of(arrived=NOW() - 10, alone=5.0, deadline=NOW() + 50)
    operator.clock = PlansClock(sweep.folder, 0.0)
    assert operator.clock.ahead() == pytest.approx(ahead, abs=1.0)
    claim = making_claims.claim(
        operator.entry, operator.settings, sweep, anew=True, ahead=operator.clock.ahead()
    )
    assert claim is not None
    assert claim.sweep.arrived == pytest.approx(time.time() - 10, abs=2.0)
    assert claim.sweep.deadline == pytest.approx(time.time() + 50, abs=2.0)
    folder = sweep.job_folder("a") / "runs" / "0001"
    folder.mkdir(parents=True)
    spec = RunSpec(job=JOB, technique="single", folder="f", node="n", slots=1, devices=1, priority=(100.0, 0))
    (folder / "spec.json").write_text(json.dumps(spec.to_dict()))
    (folder / "alive").touch()
    end = {"event": "end", "status": "finished", "reason": "", "traceback": "", "result": {}}
    told: list[dict[str, Any]] = [{"event": "leased", "devices": [0], "technique": "single"}, end]
    lines = [{**event, "time": time.time() + second} for second, event in enumerate(told)]
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    held = Outcome.of(operator.entry, "finished", held=operator._held(sweep.job_folder("a"))).held
    assert held is not None
    assert (held.started_at, held.actual_seconds) == pytest.approx((NOW(), 1.0), abs=2.0)


def test_a_report_s_clock_that_was_set_since_the_plan_is_no_error_of_estimates(ahead: float) -> None:
    entry, cluster = operator_of().entry, Cluster(NODE)
    settings = SweepSettings(cluster=cluster, group="s")
    with DAG("d"):
        report = ReportOperator(task_id="t", settings=settings, plan_tasks=["p"], train_tasks=["t"])
    found = context()
    found["ti"].xcom_pull = lambda **_: [entry.to_dict()]
    held = {"started_at": entry.attempt - 5, "ended_at": entry.attempt, "actual_seconds": 5.0}
    speed = TrainedSpeed(batches=20, seconds_per_batch=0.2)
    outcome = dataclasses.replace(Outcome.of(entry, "finished", held=held), speed=speed, steps=20)
    assert report._errors(found, SweepContext.of(found, "s"), {}, [outcome])
    result = report_task.stages(None, report_task._now(SweepContext.of(found, "s"), [entry]) - NOW())
    assert result["sweep_seconds"] == pytest.approx(0.0, abs=2.0)


def test_clocks_that_agree_are_not_corrected(tmp_path: Path) -> None:
    assert ahead_of(tmp_path / "made") == 0.0
    (tmp_path / "file").touch()
    assert ahead_of(tmp_path / "file") is None, "nothing can be written there"


def test_what_nobody_knows_is_not_corrected(ahead: float, tmp_path: Path) -> None:
    """A disk whose clock is an hour off says nothing of who planned and did not ask it."""
    assert ahead_of_plan(tmp_path, None) == 0.0, "an earlier version planned"
    assert ahead_of_plan(tmp_path, ahead) == pytest.approx(0.0, abs=1.0), "both are as far from it"
    (tmp_path / "file").touch()
    assert ahead_of_plan(tmp_path / "file", ahead) == 0.0
