"""Runs, on an embedded store and on a server."""

from __future__ import annotations

import hashlib
import json
import math
import time
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlflow.entities import ViewType

from saturn_airflow import tracking
from saturn_airflow.model.cluster import Node
from saturn_airflow.model.jobs import Job
from saturn_airflow.model.plan import Assignment, Plan
from saturn_airflow.tracking import outbox, unique
from saturn_airflow.tracking.mlflow_runs import JobRun, SweepRun
from saturn_airflow.tracking.outbox import Outbox
from saturn_airflow.tracking.server import MlflowAwayError

PLAN = Plan(
    "nightly",
    "makespan",
    100.0,
    90.0,
    1.5,
    (Assignment("a", "ddp", 2, "local", (0, 1), 0, 60), Assignment("b", "single", 1, "local", (0,), 60, 100)),
)


def client(uri: str) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)


def open_sweep(uri: str, folder: Path, key: str = "") -> SweepRun:
    tags = {"saturn.sweep": key or f"dag/{uuid.uuid4()}/sweep", "airflow.dag_id": "dag"}
    return tracking.open_sweep(uri, "nightly", "sweep of today", tags, {"jobs": 2}, folder / "sweep")


def open_job(uri: str, folder: Path, sweep: SweepRun, name: str = "a", **params: Any) -> JobRun:
    return tracking.open_job(uri, sweep.to_dict(), name, params, {"airflow.task_id": "train"}, folder / name)


def train(run: JobRun, first: int, last: int, later: float = 0) -> None:
    for step in range(first, last + 1):
        event = {"event": "step", "step": step, "epoch": 0, "loss": 5 - step / 100, "lr": 0.001}
        run.follow({**event, "time": 1.7e9 + step + later})


def history(uri: str, run_id: str | None, metric: str = "loss") -> list[tuple[int, float]]:
    return [(m.step, m.value) for m in client(uri).get_metric_history(run_id, metric)]


def test_a_sweep_and_its_jobs_are_parent_and_children_to_be_compared(
    uri: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sweep = open_sweep(uri, tmp_path)
    assert sweep.id is not None
    for name, lr in (("a", 0.1), ("b", 0.01)):
        job = open_job(uri, tmp_path, sweep, name, lr=lr, batch_size=16, technique="ddp", devices=2)
        train(job, 0, 9)
        job.follow({"event": "eval", "step": 9, "epoch": 0, "eval_loss": 4.5})
        job.follow({"event": "end", "status": "finished", "result": {"epoch_loss": 4.9}})
        assert job.close("finished")
    children = client(uri).search_runs(
        [client(uri).get_experiment_by_name("nightly").experiment_id],
        f"tags.`mlflow.parentRunId` = '{sweep.id}'",
        order_by=["params.lr DESC"],
    )
    assert [run.info.run_name for run in children] == ["a", "b"]
    for run, rate in zip(children, ("0.1", "0.01"), strict=True):
        assert run.info.status == "FINISHED"
        assert run.data.params["lr"] == rate
        assert run.data.params["devices"] == "2"
        assert run.data.tags["saturn.status"] == "finished"
        assert run.data.tags["airflow.task_id"] == "train"
        assert run.data.metrics["eval_loss"] == 4.5
        assert run.data.metrics["epoch_loss"] == 4.9
        assert history(uri, run.info.run_id) == [(step, 5 - step / 100) for step in range(10)]
        times = [m.timestamp for m in client(uri).get_metric_history(run.info.run_id, "loss")]
        assert times == [1700000000000 + 1000 * step for step in range(10)]
    assert client(uri).get_run(sweep.id).info.status == "RUNNING"
    assert sweep.close("failed", "b did not converge")
    ended = client(uri).get_run(sweep.id)
    assert ended.info.status == "FAILED"
    assert ended.data.tags["saturn.reason"] == "b did not converge"
    assert capfd.readouterr().out == "", "a line for each run that ends would fill a task's log"


def test_retries_and_later_tasks_find_the_same_runs(uri: str, tmp_path: Path) -> None:
    sweep = open_sweep(uri, tmp_path, "dag/run-1/retried")
    assert open_sweep(uri, tmp_path / "retry", "dag/run-1/retried").id == sweep.id
    assert (
        tracking.reopen_sweep(uri, json.loads(json.dumps(sweep.to_dict())), tmp_path / "plan").id == sweep.id
    )
    first, second, other = (open_job(uri, tmp_path / n, sweep, n[0]) for n in ("a", "a again", "b"))
    assert all(job.wait(30) for job in (first, second, other))
    assert first.id == second.id != other.id
    for job in (first, second, other):
        job.close()


@pytest.mark.slow
def test_a_run_whose_creator_died_before_it_counted_is_replaced(uri: str, tmp_path: Path) -> None:
    sweep = open_sweep(uri, tmp_path)
    run = client(uri).get_run(sweep.id)
    key = f"dag/{uuid.uuid4()}/sweep"
    tags = {"saturn.key": hashlib.sha256(key.encode()).hexdigest()}
    halves = [client(uri).create_run(run.info.experiment_id, tags=tags).info.run_id for _ in range(3)]
    opened = open_sweep(uri, tmp_path / "again", key).id
    assert opened not in halves
    left = client(uri).search_runs([run.info.experiment_id], f"tags.`saturn.key` = '{tags['saturn.key']}'")
    assert [run.info.run_id for run in left] == [opened]


def test_tries_while_mlflow_fails_half_way_add_one_run_together(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = client(uri).create_experiment(f"half way {uuid.uuid4()}")

    def ask() -> str:
        arguments: Any = (uri, experiment, "dag/run/sweep", ("sweep", "s"), "sweep", {}, 0, "this one")
        return str(unique.find_or_create(*arguments).info.run_id)

    def fails(*_: Any) -> bool:
        raise MlflowAwayError("it answers 500")

    with monkeypatch.context() as patch:
        patch.setattr(unique, "_set_once", fails)
        for _ in range(3):
            with pytest.raises(MlflowAwayError):
                ask()
    (half,) = client(uri).search_runs([experiment])
    assert ask() == ask() == half.info.run_id
    everything = client(uri).search_runs([experiment], run_view_type=ViewType.ALL)
    assert [run.info.run_id for run in everything] == [half.info.run_id]


def test_a_job_that_comes_back_continues_its_run_with_each_step_once(uri: str, tmp_path: Path) -> None:
    sweep = open_sweep(uri, tmp_path)
    run = open_job(uri, tmp_path, sweep, technique="ddp", devices=2)
    train(run, 0, 20)
    assert run.close("stopped", "the node was lost")
    assert client(uri).get_run(run.id).info.status == "KILLED"

    again = open_job(uri, tmp_path, sweep, technique="fsdp", devices=2)
    train(again, 15, 30, later=1000)  # from the checkpoint of step 14
    assert again.flush()
    assert client(uri).get_run(run.id).info.status == "RUNNING"
    elsewhere = open_job(uri, tmp_path / "other node", sweep, technique="single", devices=1)
    assert elsewhere.wait(30)
    train(elsewhere, 25, 40, later=2000)
    assert elsewhere.close("finished")
    again.leave()

    assert again.id == run.id == elsewhere.id
    assert [step for step, _ in history(uri, run.id)] == list(range(41))
    data = client(uri).get_run(run.id).data
    assert data.params["technique"] == "ddp"
    assert (data.tags["technique"], data.tags["devices"]) == ("single", "1")
    assert data.tags["saturn.status"] == "finished"


def test_a_job_tells_under_what_it_trains_now(embedded_uri: str, tmp_path: Path) -> None:
    sweep = open_sweep(embedded_uri, tmp_path)
    run = open_job(embedded_uri, tmp_path, sweep, technique="ddp", devices=2)
    for technique, devices in (("ddp", [0, 1]), ("single", [1]), ("ddp", [0, 1])):
        run.follow({"event": "leased", "technique": technique, "devices": devices, "names": []})
        assert run.flush()
        data = client(embedded_uri).get_run(run.id).data
        told = [data.tags.get(key, data.params[key]) for key in ("technique", "devices")]
        assert told == [technique, str(len(devices))]
    assert run.close()


def test_old_news_from_another_node_does_not_reopen_a_run_that_ended(uri: str, tmp_path: Path) -> None:
    sweep = open_sweep(uri, tmp_path)
    late = tracking.open_job("http://127.0.0.1:9", sweep, "a", {"node": "a"}, {}, tmp_path / "late")
    train(late, 0, 9)
    assert not late.close("failed", "the node was lost")
    job = open_job(uri, tmp_path, sweep, node="b")
    assert job.wait(30)
    train(job, 10, 19)
    assert job.close("finished")

    assert tracking.send_outbox(uri, tmp_path / "late")
    run = client(uri).get_run(job.id)
    assert (run.info.status, run.data.tags["saturn.status"]) == ("FINISHED", "finished")
    assert not {"node", "saturn.reason"} & set(run.data.tags)
    assert sorted(step for step, _ in history(uri, job.id)) == list(range(20))


def test_a_job_whose_node_records_in_another_mlflow_says_so(
    embedded_uri: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sweep = open_sweep(embedded_uri, tmp_path)
    assert open_job(embedded_uri, tmp_path, sweep).close()
    other = open_job(f"sqlite:///{tmp_path}/another.db", tmp_path, sweep, "b")
    assert other.close()
    (said,) = (message for message in caplog.messages if "is recorded in" in message)
    assert f"b is recorded in sqlite:///{tmp_path}/another.db, which does not have" in said
    assert f"run {sweep.id} that its first task began" in said


def test_a_job_that_goes_on_after_the_clock_was_set_back_runs_and_ends(
    embedded_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = open_sweep(embedded_uri, tmp_path)
    assert open_job(embedded_uri, tmp_path, sweep).close("stopped", "it was cleared")
    set_back = SimpleNamespace(time=lambda: time.time() - 3600.0)
    monkeypatch.setattr(outbox, "time", set_back)
    job = open_job(embedded_uri, tmp_path, sweep)
    assert job.flush()
    assert client(embedded_uri).get_run(job.id).info.status == "RUNNING"
    assert job.close("finished")
    run = client(embedded_uri).get_run(job.id)
    assert (run.info.status, run.data.tags["saturn.status"]) == ("FINISHED", "finished")


def test_steps_repeated_while_mlflow_was_away_are_recorded_once(embedded_uri: str, tmp_path: Path) -> None:
    sweep = open_sweep(embedded_uri, tmp_path)
    for first, last in ((0, 20), (15, 30)):
        away = tracking.open_job("http://127.0.0.1:9", sweep, "a", {}, {}, tmp_path / "a")
        train(away, first, last, later=first)
        away.leave()
    job = open_job(embedded_uri, tmp_path, sweep)
    assert job.close()
    assert [step for step, _ in history(embedded_uri, job.id)] == list(range(31))


@pytest.mark.parametrize(
    ("status", "expected"),
    [("finished", "FINISHED"), ("failed", "FAILED"), ("stopped", "KILLED"), ("pruned", "KILLED")],
)
def test_each_end_has_its_status(embedded_uri: str, tmp_path: Path, status: str, expected: str) -> None:
    job = open_job(embedded_uri, tmp_path, open_sweep(embedded_uri, tmp_path))
    assert job.close(status, "because")
    run = client(embedded_uri).get_run(job.id)
    assert run.info.status == expected
    assert run.data.tags["saturn.status"] == status
    assert run.data.tags["saturn.reason"] == "because"


def test_the_plan_its_chart_and_the_report_are_artifacts(uri: str, tmp_path: Path) -> None:
    from mlflow.artifacts import download_artifacts

    sweep = open_sweep(uri, tmp_path)
    sweep.log_plan(PLAN)
    sweep.log_chart(PLAN, [Node("local", 4, "cpu")])
    rows = [{"job": "a", "loss": 1.0, "device_ids": [0, 1]}, {"job": "b", "reason": "its loss is NaN"}]
    best = {"job": "a", "metric": "loss", "value": 1.0, "model_uri": None}
    sweep.log_report({"actual_seconds": 104.0, "failed": ["b"], "jobs": rows, "best": best})
    assert sweep.close()

    folder = Path(download_artifacts(run_id=sweep.id, tracking_uri=uri, dst_path=str(tmp_path / "got")))
    plan = folder / "plan" / "round-1"
    assert Plan.from_dict(json.loads((plan / "plan.json").read_text())) == PLAN
    assert (plan / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert (plan / "plan.svg").read_text().lstrip().startswith("<?xml")
    assert json.loads((folder / "report.json").read_text())["failed"] == ["b"]
    run = client(uri).get_run(sweep.id)
    metrics = ("planned_seconds", "lower_bound_seconds", "actual_seconds")
    assert [run.data.metrics[name] for name in metrics] == [100.0, 90.0, 104.0]
    assert run.data.metrics["gap"] == pytest.approx(1 / 9)
    assert run.data.tags["saturn.best.job"] == "a"


def test_a_plan_that_nobody_sent_is_sent_with_the_next_records(uri: str, tmp_path: Path) -> None:
    sweep = open_sweep(uri, tmp_path)
    tracking.reopen_sweep(uri, sweep.to_dict(), tmp_path / "sweep", send=False).log_plan(PLAN)
    assert "planned_seconds" not in client(uri).get_run(sweep.id).data.metrics
    tracking.reopen_sweep(uri, sweep.to_dict(), tmp_path / "sweep")
    assert client(uri).get_run(sweep.id).data.metrics["planned_seconds"] == 100.0


def test_the_jobs_table_is_one_mlflow_can_load(uri: str, tmp_path: Path) -> None:
    import mlflow

    sweep = open_sweep(uri, tmp_path)
    sweep.log_report(
        {"jobs": [{"job": "a", "loss": 1.5, "device_ids": [0, 1]}, {"job": "b", "reason": "NaN"}]}
    )
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(uri)
    try:
        experiment = client(uri).get_experiment_by_name("nightly").experiment_id
        table = client(uri).load_table(experiment, "jobs.json", run_ids=[sweep.id])
    finally:
        mlflow.set_tracking_uri(before)
    assert list(table["job"]) == ["a", "b"]
    assert table["loss"][0] == 1.5
    sweep.close()


def test_a_model_is_found_under_the_uri_that_is_returned(uri: str, tmp_path: Path) -> None:
    from mlflow.artifacts import download_artifacts

    weights = tmp_path / "checkpoint"
    (weights / "deep").mkdir(parents=True)
    (weights / "model.safetensors").write_bytes(bytes(range(256)) * 1000)
    (weights / "deep" / "state.json").write_text("{}")
    job = open_job(uri, tmp_path, open_sweep(uri, tmp_path))
    assert job.wait(30)
    model_uri = job.log_model_folder(weights)
    assert model_uri == f"runs:/{job.id}/model"
    assert job.close()
    got = Path(download_artifacts(model_uri, tracking_uri=uri, dst_path=str(tmp_path / "got")))
    assert (got / "model.safetensors").read_bytes() == bytes(range(256)) * 1000
    assert (got / "deep" / "state.json").read_text() == "{}"


def test_a_sweep_finds_the_runs_of_its_jobs_alone(embedded_uri: str, tmp_path: Path) -> None:
    sweep, other = (open_sweep(embedded_uri, tmp_path / day) for day in ("mon", "tue"))
    job = open_job(embedded_uri, tmp_path, sweep, "a")
    assert job.close()
    assert sweep.run_of("a") == job.id
    assert sweep.run_of("b") is None
    assert other.run_of("a") is None
    away = tracking.open_sweep(
        "http://127.0.0.1:9", "e", "s", {"saturn.sweep": "k"}, {}, tmp_path / "away", 0
    )
    assert away.run_of("a") is None


def test_a_job_names_the_data_it_reads(uri: str, tmp_path: Path) -> None:
    job = Job(
        "a", "m:model", "m:rows", load_eval_dataloader="m:held_out", data_args={"rows": 8, "day": "1st"}
    )
    params = tracking.job_params(job)
    for name, data_args in (("a", {}), ("again", {}), ("other", {"data.rows": "9"})):
        run = tracking.open_job(
            uri, open_sweep(uri, tmp_path), name, {**params, **data_args}, {}, tmp_path / name
        )
        assert run.close()
        inputs = client(uri).get_run(run.id).inputs.dataset_inputs
        found = {item.tags[0].value: item.dataset for item in inputs}
        assert {context: data.name for context, data in found.items()} == {
            "training": "m:rows",
            "evaluation": "m:held_out",
        }
        if name == "a":
            digest = found["training"].digest
            source = json.loads(found["training"].source)["tags"]
            assert source == {"mlflow.source.name": "m:rows", "rows": "8", "day": "1st"}
        assert (found["training"].digest == digest) == (name != "other")


def test_what_mlflow_refuses_is_put_aside_and_the_rest_arrives(uri: str, tmp_path: Path) -> None:
    job = open_job(uri, tmp_path, open_sweep(uri, tmp_path))
    train(job, 0, 2)
    # A record no version of Saturn writes: its key is not one MLflow allows.
    job._outbox.append({"kind": "metrics", "name": "own", "step": 0, "time": 1, "values": {"a;b": 1.0}})
    job.log_artifact(tmp_path / "nowhere")
    train(job, 3, 4)
    assert job.close()
    assert [step for step, _ in history(uri, job.id)] == [0, 1, 2, 3, 4]
    aside = [
        json.loads(line) for line in (tmp_path / "a" / "mlflow" / "refused.jsonl").read_text().splitlines()
    ]
    assert aside[0]["record"]["values"] == {"a;b": 1.0}
    assert "is not there any more" in aside[1]["reason"]
    assert len(aside) == 2


def test_a_loss_that_is_no_number_arrives(uri: str, tmp_path: Path) -> None:
    job = open_job(uri, tmp_path, open_sweep(uri, tmp_path))
    job.follow({"event": "step", "step": 0, "epoch": 0, "loss": math.nan})
    job.follow({"event": "end", "status": "failed", "traceback": "Traceback: the loss is NaN"})
    assert job.close("failed", "the loss is NaN")
    ((step, loss),) = history(uri, job.id)
    assert step == 0
    assert math.isnan(loss)
    assert [item.path for item in client(uri).list_artifacts(job.id)] == ["traceback.txt"]


def test_a_deleted_run_comes_back_with_its_whole_history(uri: str, tmp_path: Path) -> None:
    job = open_job(uri, tmp_path, open_sweep(uri, tmp_path))
    train(job, 0, 4)
    assert job.flush()
    deleted = job.id
    client(uri).delete_run(deleted)
    train(job, 5, 9)
    assert job.close()
    assert job.id != deleted
    assert [step for step, _ in history(uri, job.id)] == list(range(10))


def test_names_of_any_kind_are_kept(uri: str, tmp_path: Path) -> None:
    name = "<script>alert('1')</script> \"ü\" % `x` $y$ 模型"
    sweep = open_sweep(uri, tmp_path, f"dag/{name}/{uuid.uuid4()}")
    job = tracking.open_job(uri, sweep, name, {}, {}, tmp_path / "job")
    again = tracking.open_job(uri, sweep, name, {}, {}, tmp_path / "again")
    assert job.close()
    assert again.close()
    assert job.id == again.id
    assert client(uri).get_run(job.id).info.run_name == name


def test_an_experiment_mlflow_does_not_take_loses_nothing(embedded_uri: str, tmp_path: Path) -> None:
    sweep = tracking.open_sweep(embedded_uri, "x" * 1000, "sweep", {"saturn.sweep": "k"}, {}, tmp_path, 0)
    sweep.log_metrics({"actual_seconds": 1.0})
    assert not sweep.close()
    assert sweep.id is None
    kinds = [record["kind"] for record, _ in Outbox(tmp_path).read(0)]
    assert kinds == ["run", "metrics", "end"]
    assert not (tmp_path / "mlflow" / "refused.jsonl").exists()


@pytest.mark.slow
def test_a_sweep_that_nobody_reports_is_ended_with_its_jobs_and_may_go_on(
    embedded_uri: str, tmp_path: Path
) -> None:
    dag = f"dag-{tmp_path.name}"

    def opened(key: str, run_id: str) -> SweepRun:
        tags = {"saturn.sweep": key, "airflow.run_id": run_id}
        return tracking.open_sweep(embedded_uri, dag, "sweep", tags, {}, tmp_path / key.replace("/", "-"))

    sweep, other = opened(f"{dag}/2026/11/sweep", "2026/11"), opened(f"{dag}-2/2026/11/sweep", "2026/11")
    job = open_job(embedded_uri, tmp_path / "job", sweep)
    job.leave()
    (found,) = tracking.running_sweeps(embedded_uri, dag, dag)
    assert (found.name, found.mlflow_run) == ((dag, "2026/11", "sweep"), sweep.id)
    told, folder = sweep.to_dict(), tmp_path / f"{dag}-2026-11-sweep"
    tracking.stop_sweep(embedded_uri, found.mlflow_run, "it was cancelled", folder)
    assert not tracking.has_unsent(folder)
    assert tracking.running_sweeps(embedded_uri, "another", dag) == []
    assert tracking.running_sweeps(embedded_uri, dag, dag) == []

    def status(run: Any) -> str:
        return str(client(embedded_uri).get_run(run.id).info.status)

    assert [status(run) for run in (sweep, job, other)] == ["KILLED", "KILLED", "RUNNING"]

    tracking.go_on(embedded_uri, told, folder, patience=5)
    assert status(sweep) == "RUNNING", "whoever stopped it told the sweep's folder"
    tracking.reopen_sweep(embedded_uri, told, folder).close("stopped")
    tracking.go_on(embedded_uri, told, folder, patience=5)
    assert status(sweep) == "RUNNING"
    tracking.reopen_sweep(embedded_uri, told, folder).close("finished")
    tracking.go_on(embedded_uri, told, folder, patience=5)
    assert status(sweep) == "FINISHED", "only what was stopped goes on"
