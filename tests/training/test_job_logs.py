"""What a job's own code logs with MLflow ends in the run of its job, once, under every technique."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from running import spec_for

from saturn_airflow import HParams, Job, tracking
from saturn_airflow.launch import runs
from saturn_airflow.launch.request import Measure
from saturn_airflow.tracking import server
from saturn_airflow.tracking.events import Recorder

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('logs')}/mlflow.db"


def logging_job(**args: Any) -> Job:
    return Job(
        "logs",
        load_model="logging_jobs:model",
        load_dataloader="logging_jobs:rows",
        loss_function="logging_jobs:loss",
        data_args=args,
        hparams=HParams(batches=10, batch_size=8, lr=0.01),
    )


def followed(job: Job, folder: Path, uri: str, *techniques: tuple[str, int], **settings: Any) -> Any:
    """The job's run in MLflow after it was trained, by one try after the other."""
    sweep = tracking.open_sweep(uri, "logs", "sweep", {"saturn.sweep": str(folder)}, {}, folder / "sweep")
    for technique, devices in techniques:
        run = runs.start(spec_for(folder, job, technique, devices, **settings))
        record = tracking.open_job(uri, sweep, job.name, {"lr": 0.01}, {}, folder / "state")
        end: dict[str, Any] = {}
        for event in run.events(poll=0.02):
            record.follow(event)
            end = event
        record.leave()
        run.done_with()
    assert end["status"] == "finished", end
    record = tracking.open_job(uri, sweep, job.name, {"lr": 0.01}, {}, folder / "state")
    record.close()
    mlflow = server.client(uri)
    experiments = mlflow.search_experiments()
    assert {e.name for e in experiments} == {"Default", "logs"}
    found = mlflow.search_runs([e.experiment_id for e in experiments])
    assert {run.info.run_name for run in found} == {"sweep", "logs"}, "stray runs"
    assert len(found) == 2 * len({run.data.tags.get("saturn.sweep") for run in found} - {None}), "stray runs"
    return mlflow, mlflow.get_run(str(record.id))


@pytest.mark.parametrize("technique", ["single", "ddp", "pipeline"])
def test_what_a_jobs_code_logs_is_in_its_run(technique: str, tmp_path: Path, uri: str) -> None:
    devices = 1 if technique == "single" else 2
    parameters = {"micro_batches": 2, "schedule": "1f1b"} if technique == "pipeline" else {}
    mlflow, run = followed(logging_job(), tmp_path, uri, (technique, devices), parameters=parameters)
    assert run.info.run_name == "logs"
    assert run.info.status == "FINISHED"
    assert run.data.params["layers"] == "4"
    assert run.data.params["lr"] == "0.01"  # what it is trained with
    assert run.data.tags["lr"] == "as written"
    assert run.data.tags.items() >= {"owner": "ada", "inner": "yes", "half": "done"}.items()
    assert run.data.metrics["set_up"] == 1.0
    calls = 2 if technique == "pipeline" else 1  # of the loss function in a step
    for name in ("bias", "rows", "job/loss"):
        history = mlflow.get_metric_history(run.info.run_id, name)
        assert sorted(m.step for m in history) == sorted([*range(1, 11)] * calls), name
    assert all(math.isfinite(m.value) for m in mlflow.get_metric_history(run.info.run_id, "bias"))
    assert len(mlflow.get_metric_history(run.info.run_id, "loss")) == 10  # the training's own
    files = {file.path for file in mlflow.list_artifacts(run.info.run_id)}
    assert files >= {"model.txt", "about", "half.txt"}
    assert [f.path for f in mlflow.list_artifacts(run.info.run_id, "about")] == ["about/data.json"]


def test_a_step_that_is_trained_again_is_logged_once(tmp_path: Path, uri: str) -> None:
    job = logging_job(kill_at=f"7 {tmp_path}/killed")
    mlflow, run = followed(job, tmp_path, uri, ("single", 1), ("ddp", 2), checkpoint_batches=3)
    assert (tmp_path / "killed").exists()
    for name, wanted in (("bias", [*range(1, 11)]), ("set_up", [0])):
        history = mlflow.get_metric_history(run.info.run_id, name)
        assert sorted(m.step for m in history) == wanted, name


def test_a_trial_logs_nothing(tmp_path: Path) -> None:
    job = logging_job(workers=1)
    spec = spec_for(tmp_path, job, mode="trial", measure=Measure(1, 2), verdict=None)
    events = list(runs.start(spec).events(poll=0.02))
    assert events[-1]["status"] == "finished", events[-1]
    assert "logged" not in {event["event"] for event in events}
    assert not list((tmp_path / "state").rglob("logged"))


def test_what_workers_of_the_data_log_does_not_disturb(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("SATURN_TEST_LOGS_IN_WORKERS", "1")
    events = list(runs.start(spec_for(tmp_path, logging_job(workers=2))).events(poll=0.02))
    assert events[-1]["status"] == "finished", events[-1]
    logged = [metric for event in events if event["event"] == "logged" for metric in event.get("metrics", ())]
    names = {name for name, *_ in logged}
    assert "bias" in names
    assert "fetched" not in names


def test_logging_a_model_is_refused_with_the_reason(tmp_path: Path) -> None:
    job = Job(
        "logs",
        load_model="logging_jobs:with_log_model",
        load_dataloader="logging_jobs:rows",
        loss_function="logging_jobs:loss",
        hparams=HParams(batches=2),
    )
    (*_, end) = runs.start(spec_for(tmp_path, job)).events(poll=0.02)
    assert end["status"] == "failed"
    assert "logs the finished model of the job by itself" in end["reason"]


def test_metrics_whose_step_the_training_does_not_tell_go_by_their_own() -> None:
    def told(step: int, number: int, source: str = "") -> dict[str, Any]:
        metrics = [["f1", 0.5, 1000, step]]
        return {"event": "logged", "metrics": metrics, "at": [step, number], "source": source}

    recorder = Recorder(logged={"": [7, 1]})
    assert recorder.records(told(7, 1)) == recorder.records(told(6, 5)) == []
    (record,) = recorder.records(told(7, 2))
    assert (record["step"], record["logged"]) == (7, {"": [7, 2]})
    assert recorder.records(told(7, 0, "loss"))
    unplaced = {**told(0, 0), "at": None}
    assert recorder.records(unplaced)
    assert recorder.records(unplaced)
