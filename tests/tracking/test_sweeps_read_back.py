"""What MLflow knows of earlier sweeps, read back."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from saturn_airflow import tracking
from saturn_airflow.model.errors import SaturnError
from saturn_airflow.tracking import server, sweep_runs


def test_sweeps_of_more_jobs_than_mlflow_tells_of_at_once_are_shown_whole(
    embedded_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = f"dag/it's {uuid.uuid4()}/sweep"
    sweep = tracking.open_sweep(embedded_uri, "e", "sweep", {"saturn.sweep": key}, {}, tmp_path / "sweep")
    names = ["a", "b", "c"]
    assert all(
        tracking.open_job(embedded_uri, sweep, name, {}, {}, tmp_path / name).close() for name in names
    )
    monkeypatch.setattr(sweep_runs, "_PAGE", 2)  # jobs, and experiments
    server.client(embedded_uri).create_experiment(f"another {uuid.uuid4()}")
    assert [job["job"] for job in sweep_runs.one(embedded_uri, key)["jobs"]] == names
    with pytest.raises(SaturnError, match="knows no sweep"):
        sweep_runs.one(embedded_uri, "dag/no/sweep")
