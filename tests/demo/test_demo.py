"""`saturn demo` from the wheel, in an empty folder: from nothing to trained models, nothing left behind."""

from __future__ import annotations

import re
import stat
from typing import Any

import mlflow
import pytest
from running_demo import left_of

pytestmark = [pytest.mark.services, pytest.mark.timeout(1800)]
JOBS = 8


def test_it_succeeds_and_shows_each_job(demo: Any) -> None:
    assert demo["status"] == 0, demo["printed"]
    assert stat.S_IMODE(demo["state"].stat().st_mode) == 0o700, "of other users"
    table = demo["printed"].split("What the sweep did")[1]
    rows = re.findall(r"^ *(gpt2|vit)-\S+ +\w+ +[12] +[\d.]+ s +[\d.]+ s +\d+\.\d+", table, re.MULTILINE)
    assert sorted(rows) == ["gpt2"] * (JOBS // 2) + ["vit"] * (JOBS // 2)
    assert "proven within" in table
    assert "Estimated time saved against one job after another on all devices" in table
    assert re.search(r"Stages: trials \d+ s, profile \d+ s, plan \d+ s, train \d+ s, report \d+ s", table)


def test_both_uis_answer_until_ctrl_c(demo: Any) -> None:
    assert demo["answers"] == {"Airflow": 200, "MLflow": 200}


def test_nothing_is_left_running(demo: Any) -> None:
    assert len(demo["alive"]) > 1, "while it runs it is seen"
    assert left_of(demo["state"]) == set()


def test_mlflow_holds_one_parent_and_a_child_per_job_with_losses_that_fall(demo: Any) -> None:
    client = mlflow.MlflowClient(f"sqlite:///{demo['state']}/mlflow.db")
    experiment = client.get_experiment_by_name("nightly_retrain")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    run_id = re.search(r"/runs/(manual\S+)", demo["printed"])[1]  # type: ignore[index]
    runs = [run for run in runs if run.data.tags["airflow.run_id"] == run_id]  # type: ignore[assignment]
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    children = [run for run in runs if run is not parent]
    assert len(children) == JOBS
    for child in children:
        assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert child.info.status == "FINISHED"
        losses = [metric.value for metric in client.get_metric_history(child.info.run_id, "loss")]
        fifth = len(losses) // 5
        assert sum(losses[-fifth:]) < sum(losses[:fifth]), child.info.run_name
        assert {"technique", "devices", "node", "lr", "batch_size"} <= set(child.data.params)
        assert "eval_loss" in child.data.metrics
    assert {"planned_seconds", "actual_seconds", "gap"} <= set(parent.data.metrics)
    (plan,) = demo["state"].glob(f"mlflow-artifacts/*/{parent.info.run_id}/artifacts/plan/round-1")
    assert {"plan.json", "plan.png", "plan.svg"} == {path.name for path in plan.iterdir()}
