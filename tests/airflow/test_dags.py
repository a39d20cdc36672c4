"""The example DAGs, run: jobs from an upstream task, one's own technique, halving, promotion by a human."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import httpx
import mlflow
import numpy as np
import pytest
from mlflow import MlflowClient

pytestmark = [pytest.mark.services, pytest.mark.timeout(1800)]
#: Seconds for a run; four share two devices.
PATIENCE = 600
DAGS = ("jobs_from_upstream", "own_technique", "champion_challenger", "hyperparameter_halving")


@pytest.fixture(scope="module")
def runs(deployment: Any) -> dict[str, str]:
    """A run of each, all at once."""
    return {dag_id: deployment.start(dag_id) for dag_id in DAGS}


def finished(deployment: Any, runs: Any, dag_id: Any) -> bool:
    return bool(deployment.wait(dag_id, runs[dag_id], PATIENCE) == "success")


def result(deployment: Any, runs: Any, dag_id: Any) -> dict[str, Any]:
    found: dict[str, Any] = deployment.airflow.xcom(dag_id, runs[dag_id], "sweep.report")
    return found


def test_jobs_come_from_an_upstream_task(deployment: Any, runs: dict[str, str]) -> None:
    assert finished(deployment, runs, "jobs_from_upstream")
    jobs = result(deployment, runs, "jobs_from_upstream")["jobs"]
    assert len(jobs) == 3
    assert {job["status"] for job in jobs} == {"finished"}
    assert all(job["job"].startswith("gpt2 on ") for job in jobs)


def test_a_technique_of_ones_own_trains(deployment: Any, runs: dict[str, str]) -> None:
    assert finished(deployment, runs, "own_technique")
    jobs = result(deployment, runs, "own_technique")["jobs"]
    assert [(job["status"], job["technique"]) for job in jobs] == [("finished", "half_gradients")] * 2


def test_a_challenger_becomes_the_champion_when_a_human_agrees(
    deployment: Any, runs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dag_id, run_id = "champion_challenger", runs["champion_challenger"]
    deadline = time.monotonic() + PATIENCE
    waiting: dict[str, Any] = {}
    while "approve" not in waiting:
        with contextlib.suppress(httpx.TimeoutException):
            waiting = _required_actions(deployment, dag_id, run_id)
            assert deployment.airflow.state(dag_id, run_id) != "failed", deployment.states(dag_id, run_id)
        assert time.monotonic() < deadline, deployment.states(dag_id, run_id)
        time.sleep(0.5)
    best = result(deployment, runs, dag_id)["best"]
    assert waiting["approve"]["subject"] == "Promote version 1 of digits?"
    assert best["job"] in waiting["approve"]["body"]
    client = MlflowClient(deployment.services.mlflow_url)
    assert set(client.get_registered_model("digits").aliases) == {"challenger"}
    # The accuracy, large is good, chose the job; MLflow has it by epoch.
    jobs = result(deployment, runs, dag_id)["jobs"]
    assert best["metric"] == "accuracy"
    assert best["value"] == max(job["metrics"]["accuracy"] for job in jobs)
    by_step = client.get_metric_history(best["run_id"], "accuracy")
    assert [metric.value for metric in by_step][-1] == best["value"]
    assert len(by_step) == 2

    path = f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances/approve/-1/hitlDetails"
    deployment.airflow.send("PATCH", path, {"chosen_options": ["Approve"], "params_input": {}})
    assert finished(deployment, runs, dag_id)
    champion = client.get_model_version_by_alias("digits", "champion")
    assert champion.run_id == best["run_id"]

    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "dags")  # where the model's module is
    mlflow.set_tracking_uri(deployment.services.mlflow_url)
    model = mlflow.pyfunc.load_model("models:/digits@champion")
    assert model.metadata.signature.inputs.input_names() == ["pixel_values"]
    images = np.zeros((3, 1, 8, 8), dtype=np.float32)
    assert model.predict({"pixel_values": images})["logits"].shape == (3, 10)


def test_the_runs_of_a_sweep_compare_in_mlflow(deployment: Any, runs: dict[str, str]) -> None:
    assert finished(deployment, runs, "own_technique")
    client = MlflowClient(deployment.services.mlflow_url)
    experiment = client.get_experiment_by_name("own_technique")
    assert experiment is not None
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"
    found = client.search_runs([experiment.experiment_id])
    (parent,) = [run for run in found if "mlflow.parentRunId" not in run.data.tags]
    children = [run for run in found if run is not parent]
    assert [run.data.params["technique"] for run in children] == ["half_gradients"] * 2
    assert sorted(float(run.data.params["lr"]) for run in children) == [1e-3, 3e-3]
    for run in children:
        assert {"loss", "epoch_loss", "samples_per_second", "planned_seconds"} <= set(run.data.metrics)
        hours = run.data.metrics["actual_seconds"] * int(run.data.params["devices"]) / 3600
        assert run.data.metrics["device_hours"] == pytest.approx(hours)
        (data,) = run.inputs.dataset_inputs  # type: ignore[union-attr]
        assert data.dataset.name == "shop.data:python_text"
    spent = sum(run.data.metrics["device_hours"] for run in children)
    assert parent.data.metrics["device_hours"] == pytest.approx(spent)


def test_losers_are_pruned_and_nothing_fails(deployment: Any, runs: dict[str, str]) -> None:
    dag_id = "hyperparameter_halving"
    assert finished(deployment, runs, dag_id)
    found = result(deployment, runs, dag_id)
    statuses = {job["job"]: job["status"] for job in found["jobs"]}
    assert sorted(statuses.values()) == ["finished"] * 2 + ["pruned"] * 4
    assert statuses[found["best"]["job"]] == "finished"
    assert found["failed"] == []

    states = deployment.states(dag_id, runs[dag_id])
    assert not {"failed", "upstream_failed"} & set(states.values())
    for job, status in statuses.items():
        of_job = {state for task, state in states.items() if task.endswith(f".train {job}")}
        assert of_job == ({"success", "skipped"} if status == "pruned" else {"success"}), job

    client = MlflowClient(deployment.services.mlflow_url)
    experiment = client.get_experiment_by_name(dag_id)
    assert experiment is not None
    told = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    for job, status in statuses.items():
        assert told[job].data.tags["saturn.status"] == status
        assert told[job].info.status == {"finished": "FINISHED", "pruned": "KILLED"}[status]


def test_nothing_runs_by_its_schedule_before_what_is_asked_for(deployment: Any) -> None:
    """Whatever the time of day: a tenth of the interval after each full one, a DAG that is unpaused runs."""
    run_id = deployment.start("every_minute")
    assert deployment.wait("every_minute", run_id) == "success"
    found = deployment.airflow.get("/dags/every_minute/dagRuns")["dag_runs"]
    assert [run["dag_run_id"] for run in found] == [run_id]


def _required_actions(deployment: Any, dag_id: Any, run_id: Any) -> dict[str, Any]:
    """What waits for a human, by the id of its task."""
    found = deployment.airflow.get(f"/dags/{dag_id}/dagRuns/{run_id}/hitlDetails")["hitl_details"]
    return {action["task_instance"]["task_id"]: action for action in found}
