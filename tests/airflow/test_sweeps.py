"""Sweeps on a real Airflow: what goes wrong in one job stays there, and a retry resumes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import mlflow
import pytest
import torch

from saturn_airflow import tracking
from saturn_airflow.training.exports import load_exported

pytestmark = pytest.mark.services


@pytest.fixture(scope="module")
def started(deployment: Any) -> dict[str, str]:
    """A run of each sweep that nothing is done to while it runs, all at once, on nodes of their own."""
    dags = ("broken_sweep", "runtime_sweep", "skipped_sweep")
    return {dag_id: deployment.start(dag_id) for dag_id in dags}


@pytest.fixture(scope="module")
def broken(deployment: Any, started: dict[str, str]) -> Any:
    """The result of a sweep in which six of eight jobs go wrong."""
    run_id = started["broken_sweep"]
    state = deployment.wait("broken_sweep", run_id)
    result = deployment.airflow.xcom("broken_sweep", run_id, "sweep.report")
    return {"run_id": run_id, "state": state, "result": result}


def test_the_other_jobs_finish_and_the_result_says_which_are_missing(deployment: Any, broken: Any) -> None:
    result = broken["result"]
    statuses = {outcome["job"]: outcome["status"] for outcome in result["jobs"]}
    assert statuses == {
        "misspelt": "not_planned",
        "far": "not_planned",
        "good": "finished",
        "good <script>": "finished",
        "not-a-number": "not_a_number",
        "no-model": "not_planned",
        "bad-sample": "failed",
        "fits-nowhere": "not_planned",
    }
    assert result["missing"] == ["misspelt", "far", "not-a-number", "no-model", "bad-sample", "fits-nowhere"]
    assert result["best"]["job"] in ("good", "good <script>")
    assert deployment.airflow.xcom("broken_sweep", broken["run_id"], "use") == result["missing"]


def test_every_failure_names_its_reason(broken: Any) -> None:
    reasons = {outcome["job"]: outcome.get("reason") or "" for outcome in broken["result"]["jobs"]}
    assert "unexpected keyword argument 'weight_decai'" in reasons["misspelt"]
    assert "lower lr" in reasons["far"]
    assert "weights/latest.pt is not there" in reasons["no-model"]
    assert "loss is nan at step 41" in reasons["not-a-number"]
    assert "sample 600 is damaged" in reasons["bad-sample"]
    assert "ddp x 1: on one device ddp does what single does" in reasons["fits-nowhere"]


def test_the_plan_says_what_each_job_could_have_run_under(deployment: Any, broken: Any) -> None:
    choices = deployment.airflow.xcom("broken_sweep", broken["run_id"], "sweep.plan", "choices")
    (good,) = [choice for job, choice in choices.items() if job == "good"]
    (chosen,) = [option for option in good["options"] if option["chosen"]]
    assert (chosen["technique"], chosen["devices"], chosen["source"]) == ("single", 1, "measured")
    assert chosen["seconds"] > 0
    assert good["why"]


def test_a_deadline_that_no_plan_can_meet_is_said_in_the_log_and_the_result(
    deployment: Any, broken: Any
) -> None:
    plan = deployment.airflow.xcom("broken_sweep", broken["run_id"], "sweep.plan", "plan")
    assert plan["objective"] == "makespan"
    deadline = broken["result"]["deadline"]
    assert (deadline["planned"], deadline["met"]) == (False, False)
    assert deadline["late_seconds"] > 0
    lines = deployment.airflow.log("broken_sweep", broken["run_id"], "sweep.plan", -1, 1)
    assert any("THE DEADLINE CAN'T BE MET" in line for line in lines)


def test_the_report_says_what_measuring_took(broken: Any) -> None:
    result = broken["result"]
    assert result["trials"] >= 4
    assert 0 < result["profile_share"] < 1
    assert result["profile_seconds"] < result["sweep_seconds"]


def test_a_sweep_with_failed_jobs_is_a_failed_task(deployment: Any, broken: Any) -> None:
    states = deployment.states("broken_sweep", broken["run_id"])
    assert states["sweep.report"] == "failed"
    assert states["sweep.plan"] == "success"
    assert states["use"] == "success"
    named = {key.partition(" ")[2]: state for key, state in states.items() if key.startswith("sweep.train.")}
    assert named["good <script>"] == "success"
    assert named["bad-sample"] == "failed"


def test_the_log_of_a_failed_job_has_the_users_traceback(deployment: Any, broken: Any) -> None:
    tasks = deployment.airflow.tasks("broken_sweep", broken["run_id"])
    task = next(t for t in tasks if t["rendered_map_index"] == "bad-sample")
    lines = deployment.airflow.log(
        "broken_sweep", broken["run_id"], task["task_id"], task["map_index"], task["try_number"]
    )
    text = "\n".join(lines)
    assert "faulty.py" in text
    assert "sample 600 is damaged" in text


def test_mlflow_has_a_run_per_trained_job_below_one_parent(deployment: Any, broken: Any) -> None:
    client = mlflow.MlflowClient(deployment.services.mlflow_url)
    experiment = client.get_experiment_by_name("broken_sweep")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    parents = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    assert len(parents) == 1
    assert parents[0].info.status == "FAILED"
    children = {run.info.run_name: run for run in runs if run not in parents}
    assert set(children) == {"good", "good <script>", "not-a-number", "bad-sample"}
    assert {run.data.tags["mlflow.parentRunId"] for run in children.values()} == {parents[0].info.run_id}
    assert children["good"].info.status == "FINISHED"
    assert children["bad-sample"].info.status == "FAILED"
    losses = client.get_metric_history(children["good"].info.run_id, "loss")
    assert [m.step for m in losses] == list(range(1, 61))
    assert losses[-1].value < losses[0].value


def test_the_best_model_loads_from_its_uri(
    deployment: Any, broken: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent / "dags")
    mlflow.set_tracking_uri(deployment.services.mlflow_url)
    folder = mlflow.artifacts.download_artifacts(
        broken["result"]["best"]["model_uri"], dst_path=str(tmp_path)
    )
    model = load_exported(folder)
    inputs = torch.randn(512, 4, generator=torch.Generator().manual_seed(1))
    right = model(inputs).argmax(1) == (inputs[:, 0] > 0)
    assert right.float().mean() > 0.8


def test_a_cleared_job_trains_again_whatever_it_ended_with_before(deployment: Any, broken: Any) -> None:
    run_id = broken["run_id"]
    folder = deployment.job_folder("broken_sweep", run_id, "not-a-number")
    assert len(_events(folder, "start")) == 1, "what can't be mended by a retry is not tried again"
    tasks = deployment.airflow.tasks("broken_sweep", run_id)
    task = next(t for t in tasks if t["rendered_map_index"] == "not-a-number" and "train" in t["task_id"])
    deployment.airflow.clear("broken_sweep", run_id, task)
    _wait_until(lambda: len(_events(folder, "end")) == 2, 360)
    assert len(_events(folder, "start")) == 2
    # What is cleared at the very moment the run ends may never be scheduled: SQLite has no row locks.
    deployment.wait("broken_sweep", run_id)


def test_a_finished_job_that_is_cleared_is_trained_again_and_has_a_run_of_its_own(
    deployment: Any, broken: Any
) -> None:
    run_id = broken["run_id"]
    folder = deployment.job_folder("broken_sweep", run_id, "good")
    tasks = deployment.airflow.tasks("broken_sweep", run_id)
    task = next(t for t in tasks if t["rendered_map_index"] == "good" and "train" in t["task_id"])
    deployment.airflow.clear("broken_sweep", run_id, task)
    _wait_until(lambda: (folder / "superseded-1").exists() and len(_events(folder, "end")) == 1, 360)
    (start,) = _events(folder, "start")
    assert (start["step"], start["checkpoint"]) == (0, None)
    assert [event["step"] for event in _events(folder, "step")] == list(range(1, 61))
    assert len(_events(folder / "superseded-1", "end")) == 1
    assert "it had finished, and was cleared" in _events(folder, "warning")[0]["message"]
    (other,) = (folder.parent / "bad-sample").glob("runs")
    assert not (other.parent / "superseded-1").exists(), "who was not cleared is left alone"
    client = mlflow.MlflowClient(deployment.services.mlflow_url)
    found = client.get_experiment_by_name("broken_sweep")
    assert found is not None
    experiment = found.experiment_id

    def runs() -> Any:
        found = client.search_runs([experiment], "attributes.run_name = 'good'")
        return sorted(found, key=lambda run: run.info.start_time)

    _wait_until(lambda: len(runs()) == 2 and runs()[1].info.status == "FINISHED", 180)
    old, new = runs()
    assert (old.info.status, old.data.tags["saturn.status"]) == ("FINISHED", "superseded")
    assert "it had finished" in old.data.tags["saturn.superseded"]
    assert old.data.tags["saturn.definition"] == new.data.tags["saturn.definition"]
    assert [m.step for m in client.get_metric_history(new.info.run_id, "loss")] == list(range(1, 61))


def test_a_retry_goes_on_from_the_last_checkpoint(deployment: Any) -> None:
    run_id = deployment.start("interrupted_sweep")
    folder = deployment.job_folder("interrupted_sweep", run_id, "long")
    _wait_until(lambda: _events(folder, "checkpoint"), 360)
    pid = int(next(folder.glob("runs/*/alive")).read_text())
    os.killpg(pid, signal.SIGKILL)
    assert deployment.wait("interrupted_sweep", run_id) == "success"

    starts = _events(folder, "start")
    assert len(starts) == 2
    assert starts[0]["step"] == 0
    assert starts[1]["step"] > 0
    steps = [event["step"] for event in _events(folder, "step")]
    again = steps[len(steps) - (steps[-1] - starts[1]["step"]) :]
    assert again == list(range(starts[1]["step"] + 1, steps[-1] + 1))
    result = deployment.airflow.xcom("interrupted_sweep", run_id, "sweep.report")
    assert result["failed"] == []
    client = mlflow.MlflowClient(deployment.services.mlflow_url)
    losses = client.get_metric_history(result["jobs"][0]["run_id"], "loss")
    assert sorted({m.step for m in losses}) == list(range(1, steps[-1] + 1))


def test_a_sweep_that_was_cancelled_goes_on_when_what_failed_is_cleared(deployment: Any) -> None:
    """Airflow skips what waits; were it left so, the run would be a success that reported nothing."""
    run_id = deployment.start("cancelled_sweep")
    jobs = {"sweep.train " + job: deployment.job_folder("cancelled_sweep", run_id, job) for job in ("a", "b")}

    def finished() -> list[str]:
        states = deployment.states("cancelled_sweep", run_id)
        return [job for job in jobs if states.get(job) == "success"]

    _wait_until(lambda: all(_events(folder, "checkpoint") for folder in jobs.values()), 360)
    _wait_until(finished, 180)
    (done,) = finished()
    (stopped,) = jobs.keys() - {done}
    path = f"/dags/cancelled_sweep/dagRuns/{run_id}"
    deployment.airflow.send("PATCH", path, {"state": "failed"})
    assert deployment.airflow.state("cancelled_sweep", run_id) == "failed"
    states = deployment.states("cancelled_sweep", run_id)
    assert (states[done], states[stopped]) == ("success", "failed")
    assert {states["sweep.report"], states["use"]} == {"upstream_failed"}
    assert set(states.values()) <= {"success", "skipped", "failed", "upstream_failed"}
    # Its run ends without anybody who reports.
    _wait_until(lambda: _in_mlflow(deployment, run_id) == "KILLED", 180)

    deployment.airflow.send("POST", f"{path}/clear", {"dry_run": False, "only_failed": True})
    _wait_until(lambda: _in_mlflow(deployment, run_id) == "RUNNING", 180)
    assert deployment.wait("cancelled_sweep", run_id) == "success"
    result = deployment.airflow.xcom("cancelled_sweep", run_id, "sweep.report")
    assert {job["job"]: job["status"] for job in result["jobs"]} == {
        "a": "finished",
        "b": "finished",
    }
    assert deployment.airflow.xcom("cancelled_sweep", run_id, "use") == result["best"]["job"]
    assert len(_events(jobs[done], "start")) == 1
    assert _events(jobs[stopped], "start")[-1]["step"] > 0
    assert _in_mlflow(deployment, run_id) == "FINISHED"


def test_a_sweep_that_was_cancelled_early_ends_in_mlflow_with_the_next(
    deployment: Any,
) -> None:
    def begun() -> str:
        run_id: str = deployment.start("cancelled_sweep")
        _wait_until(
            lambda: deployment.states("cancelled_sweep", run_id).get("sweep.trials") == "success", 120
        )
        path = f"/dags/cancelled_sweep/dagRuns/{run_id}"
        deployment.airflow.send("PATCH", path, {"state": "failed"})
        return run_id

    first = begun()
    assert _in_mlflow(deployment, first) == "RUNNING"
    second = begun()
    assert _in_mlflow(deployment, first) == "KILLED"
    assert _in_mlflow(deployment, second) == "RUNNING"


def test_a_sweep_that_runs_out_of_time_has_not_succeeded(deployment: Any) -> None:
    """So it stays where single tasks of it are cleared: none that has to run yet is skipped."""
    run_id = deployment.start("timed_out_sweep")
    _wait_until(lambda: deployment.airflow.state("timed_out_sweep", run_id) == "failed", 360)
    states = deployment.states("timed_out_sweep", run_id)
    assert states["sweep.report"] == "upstream_failed"
    # The plan may have been made within the second that the run has.
    assert states["sweep.plan"] in ("success", "upstream_failed")


def _in_mlflow(deployment: Any, run_id: str) -> str:
    """The state of the run of a sweep."""
    client = mlflow.MlflowClient(deployment.services.mlflow_url)
    found = client.get_experiment_by_name("cancelled_sweep")
    assert found is not None
    wanted = f"tags.`airflow.run_id` = '{run_id}' AND tags.`saturn.sweep` != ''"
    (run,) = client.search_runs([found.experiment_id], wanted)
    return str(run.info.status)


def test_a_sweep_without_mlflow_trains_and_its_records_are_sent_later(deployment: Any) -> None:
    deployment.services.kill("mlflow")
    run_id = deployment.start("small_sweep")
    try:
        assert deployment.wait("small_sweep", run_id) == "success"
    finally:
        deployment.services.start_again("mlflow")
    result = deployment.airflow.xcom("small_sweep", run_id, "sweep.report")
    assert result["failed"] == []
    url = deployment.services.mlflow_url
    _wait_until(lambda: _answers(f"{url}/health"), 180)
    folder = deployment.job_folder("small_sweep", run_id, "small")
    assert tracking.send_outbox(url, folder)
    assert tracking.send_outbox(url, folder.parent)
    client = mlflow.MlflowClient(url)
    experiment = client.get_experiment_by_name("small_sweep")
    assert experiment is not None
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    losses = client.get_metric_history(runs["small"].info.run_id, "loss")
    assert [m.step for m in losses] == list(range(1, 31))
    (parent,) = [run for name, run in runs.items() if name != "small"]
    assert runs["small"].data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert parent.info.status == "FINISHED"


def test_what_an_earlier_sweep_measured_is_not_measured_again(deployment: Any) -> None:
    for known in (False, True):
        run_id = deployment.start("familiar_sweep")
        assert deployment.wait("familiar_sweep", run_id) == "success"
        tasks = deployment.airflow.tasks("familiar_sweep", run_id)
        wave = [(t["map_index"], t["state"]) for t in tasks if t["task_id"] == "sweep.profile.wave_1"]
        assert wave == ([(-1, "skipped")] if known else [(0, "success")])
        result = deployment.airflow.xcom("familiar_sweep", run_id, "sweep.report")
        assert result["failed"] == []
        assert result["trials"] == (0 if known else 1)
        assert (result["deadline"]["planned"], result["deadline"]["met"]) == (True, True)


def test_a_successful_sweep_sends_its_asset_event_with_the_best_job(deployment: Any) -> None:
    events = deployment.airflow.get("/assets/events", source_dag_id="familiar_sweep")["asset_events"]
    assert len(events) == 2
    assert {event["source_task_id"] for event in events} == {"sweep.report"}
    assert {event["extra"]["best"]["job"] for event in events} == {"familiar"}
    assert deployment.airflow.get("/assets/events", source_dag_id="broken_sweep")["asset_events"] == []


def test_a_sweep_behind_a_skipped_task_is_skipped(deployment: Any, started: dict[str, str]) -> None:
    run_id = started["skipped_sweep"]
    assert deployment.wait("skipped_sweep", run_id) == "success"
    states = deployment.states("skipped_sweep", run_id)
    assert {state for task, state in states.items() if task.startswith("sweep.")} == {"skipped"}


def test_jobs_may_be_known_only_at_run_time(deployment: Any, started: dict[str, str]) -> None:
    run_id = started["runtime_sweep"]
    assert deployment.wait("runtime_sweep", run_id) == "success"
    result = deployment.airflow.xcom("runtime_sweep", run_id, "sweep.report")
    assert [(o["job"], o["status"]) for o in result["jobs"]] == [("day {{ ds }}", "finished")]


def _answers(url: Any) -> Any:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url).is_success


def _events(folder: Any, kind: Any) -> Any:
    found = []
    for path in sorted(folder.glob("runs/*/events.jsonl")):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n") and json.loads(line)["event"] == kind:
                found.append(json.loads(line))
    return found


def _wait_until(condition: Any, timeout: Any) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.2)
