"""`airflow backfill create` over several days of one sweep."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import mlflow
import pytest

pytestmark = [pytest.mark.nightly, pytest.mark.services, pytest.mark.ranks, pytest.mark.timeout(1800)]
DAG = "backfilled"


def backfill(cluster: Any, first: str, last: str, **conf: Any) -> dict[str, str]:
    """Run these days again, three at once; the state of each of its runs by its id."""
    before = set(all_runs(cluster))
    command = ["backfill", "create", "--dag-id", DAG, "--from-date", first, "--to-date", last]
    options = ["--max-active-runs", "3", "--dag-run-conf", json.dumps(conf)]
    subprocess.run(
        [sys.executable, "-m", "airflow", *command, *options],
        env=cluster.environment("scheduler"),
        check=True,
        capture_output=True,
    )
    states = {run_id: cluster.wait(DAG, run_id, 800) for run_id in all_runs(cluster) if run_id not in before}
    # Airflow takes a DAG's next one when it has noticed that this is over.
    cluster.wait_until(
        lambda: all(b["completed_at"] for b in cluster.airflow.get("/backfills", dag_id=DAG)["backfills"]),
        120,
    )
    return states


def all_runs(cluster: Any) -> list[str]:
    return [run["dag_run_id"] for run in cluster.airflow.get(f"/dags/{DAG}/dagRuns")["dag_runs"]]


def test_days_gone_by_are_measured_once_and_registered_where_asked(
    cluster: Any, figure: Callable[[str], None]
) -> None:
    cluster.airflow.wait_for_dag(DAG)
    cluster.airflow.send("PATCH", f"/dags/{DAG}", {"is_paused": False})
    days = backfill(cluster, "2026-01-02", "2026-01-04")
    assert list(days.values()) == ["success"] * 3, {run: cluster.states(DAG, run) for run in days}
    measured = {run: len(cluster.airflow.xcom(DAG, run, "sweep.trials")) for run in days}
    assert sorted(measured.values())[:2] == [0, 0], measured
    assert max(measured.values()) > 0
    client = mlflow.MlflowClient(cluster.mlflow_url)
    assert [model.name for model in client.search_registered_models()] == []
    for run in days:
        result = cluster.airflow.xcom(DAG, run, "sweep.report")
        assert [job["status"] for job in result["jobs"]] == ["finished", "finished"]
    figure(f"a backfill of three days, three at once: {max(measured.values())} trials in all")

    asked = backfill(cluster, "2026-01-05", "2026-01-05", saturn={"register": True})
    assert list(asked.values()) == ["success"]
    (model,) = client.search_registered_models()
    assert (model.name, client.get_model_version_by_alias(DAG, "champion").version) == (DAG, "1")
