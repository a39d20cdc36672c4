"""What train tasks hand on: typed here, flat JSON between tasks, and read back as it was."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import DAG
from hypothesis import given
from hypothesis import strategies as st

from saturn_airflow import Cluster, Job, Node, tracking
from saturn_airflow.launch import past_runs
from saturn_airflow.model.entries import PlanEntry
from saturn_airflow.model.errors import DiskError
from saturn_airflow.model.outcomes import Outcome, Planned, TimeOnDevices, TrainedSpeed
from saturn_airflow.model.settings import SweepSettings
from saturn_airflow.model.status import Status
from saturn_airflow.operators import report_task
from saturn_airflow.operators.context import SweepContext
from saturn_airflow.operators.report_table import table
from saturn_airflow.operators.report_task import ReportOperator
from saturn_airflow.tracking.server import client

texts, counts, seconds = st.text(), st.integers(0, 1 << 40), st.floats(0, 1e9)
planned = st.builds(
    Planned,
    technique=texts,
    devices=counts,
    planned_seconds=seconds,
    kind=texts,
    node=texts,
    device_ids=st.lists(counts).map(tuple),
    parameters=st.dictionaries(texts, counts),
    fingerprint=texts,
)
held = st.builds(TimeOnDevices, started_at=seconds, ended_at=seconds, actual_seconds=seconds)
speed = st.builds(TrainedSpeed, batches=counts, seconds_per_batch=seconds, spread=seconds)
outcomes = st.builds(
    Outcome,
    job=texts,
    status=st.sampled_from(Status),
    reason=st.none() | texts,
    attempt=st.none() | seconds,
    round=st.none() | counts,
    planned=st.none() | planned,
    held=st.none() | held,
    speed=st.none() | speed,
    steps=st.none() | counts,
    loss=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    metrics=st.dictionaries(texts, seconds),
    more=st.fixed_dictionaries({"seconds": seconds}),
)


@given(outcomes)
def test_an_outcome_comes_back_from_json_as_it_was(outcome: Outcome) -> None:
    told = json.loads(json.dumps(outcome.to_dict(), allow_nan=False))
    assert Outcome.from_dict(told) == outcome
    assert ("technique" in told) == (outcome.planned is not None)
    assert ("started_at" in told) == (outcome.held is not None)


@pytest.mark.parametrize("status", Status)
def test_a_status_is_written_as_its_word(status: Status) -> None:
    assert f"{status}|{status:>20}|{status!s}" == f"{status.value}|{status.value:>20}|{status.value}"
    assert json.loads(json.dumps({"status": status})) == {"status": status.value}
    assert "_" not in status.in_words


def test_what_training_said_is_in_the_outcome() -> None:
    entry = PlanEntry(
        job=Job("a", load_model="m:f", load_dataloader="d:f"),
        technique="ddp",
        devices=2,
        node="n",
        device_ids=(0, 1),
        start=1.0,
        end=4.0,
        kind="cpu",
        fingerprint="f",
        attempt=100.0,
        position=0,
    )
    result: dict[str, Any] = {
        "steps": 8,
        "batches": 8,
        "seconds_per_batch": 0.1,
        "loss": None,
        "seconds": 1.0,
    }
    times = {"started_at": 100.0, "ended_at": 103.0, "actual_seconds": 3.0}
    outcome = Outcome.of(entry, "finished", "", result=result, held=times, training=1)
    assert outcome.in_one_go
    told = outcome.to_dict()
    assert told.items() >= {**result, **times, "planned_seconds": 3.0, "device_ids": [0, 1]}.items()
    assert told["eval_loss"] is None
    assert not Outcome.of(entry, "finished", "", result={"steps": 8}).in_one_go
    assert Outcome.of(entry, "lost").to_dict().keys().isdisjoint(["steps", "started_at", "loss", "run_id"])


def test_that_a_jobs_code_was_edited_as_it_trained_is_in_its_outcome_and_the_report(tmp_path: Path) -> None:
    """One of its runs has said so; the last one had nothing to say."""
    edited = {"event": "warning", "message": "the code of shop has changed", "mixed": True}
    step = {"event": "step", "step": 1, "epoch": 0, "loss": 1.0, "seconds": 0.1}
    other = {"event": "warning", "message": "the disk is nearly full"}
    said: list[list[dict[str, Any]]] = [[step, edited, other], [edited, step], [step]]
    for number, events in enumerate(said):
        folder = tmp_path / "runs" / f"{number:04d}"
        folder.mkdir(parents=True)
        (folder / "alive").touch()
        told = ({**event, "time": 1.0} for event in ({"event": "format", "format": 1}, *events))
        (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in told))
    result = past_runs.result_of(tmp_path, {"event": "end", "result": {"steps": 8}})
    assert result == {"steps": 8, "mixed": "the code of shop has changed"}
    outcome = Outcome.from_dict({"job": "a", "status": "finished", **result})
    assert Outcome.from_dict(outcome.to_dict()) == outcome
    assert "a: the code of shop has changed" in table({"best": None}, [outcome]).splitlines()
    assert past_runs.result_of(tmp_path / "another", {"event": "end"}) == {}


def test_the_report_leaves_tracebacks_to_the_logs_of_other_tasks() -> None:
    frames = 'Traceback (most recent call last):\n  File "shop.py", line 3, in model\nKeyError: 7'
    told = {"a": f"load_model 'shop:model' raised KeyError: 7\n{frames}", "b": frames, "c": "line 1\nline 2"}
    lost = [Outcome(job=job, status=Status.NOT_PLANNED, reason=why) for job, why in told.items()]
    lines = table({"best": None}, lost).splitlines()
    assert lines[-4:] == [
        "a not planned: load_model 'shop:model' raised KeyError: 7",
        "b not planned: KeyError: 7",
        "c not planned: line 1",
        "line 2",
    ]


@pytest.mark.slow
def test_a_report_that_finds_no_room_for_mlflows_records_is_tried_again(
    tmp_path: Path, small_disk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri, settings = f"sqlite:///{tmp_path}/mlflow.db", SweepSettings(cluster=Cluster(Node("n", 1)), group="s")
    monkeypatch.setenv("AIRFLOW__SATURN__HOME", str(small_disk.path))
    monkeypatch.setattr(report_task, "mlflow_uri", lambda conn_id: uri)
    with DAG("d"):
        report = ReportOperator(task_id="report", settings=settings, plan_tasks=["p"], train_tasks=["t"])
    ti: Any = SimpleNamespace(dag_id="d", run_id="r", task_id="report", try_number=1, max_tries=1)
    context: Any = {"ti": ti}
    sweep = SweepContext.of(context, "s")
    parent = tracking.open_sweep(uri, "e", "s", {"saturn.sweep": sweep.key}, {}, sweep.folder)
    ti.xcom_pull = lambda **asked: parent.to_dict()

    def tell() -> str:
        # More than fits beside what is there.
        result: dict[str, Any] = dict.fromkeys(map(str, range(400)), 1.0)
        result |= {"failed": [], "pruned": [], "best": None}
        report._tell_mlflow(context, sweep, [], [], [], {}, result)
        assert parent.id is not None
        return str(client(uri).get_run(parent.id).info.status)

    small_disk.fill()
    with pytest.raises(DiskError, match="records for MLflow can't be written"):
        tell()
    ti.try_number = 2
    assert tell() == "RUNNING", "the last try goes on without"
    ti.try_number = 1
    small_disk.free()
    assert tell() == "FINISHED"
