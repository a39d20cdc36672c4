"""Where MLflow is: embedded, at a server, or nowhere."""

from __future__ import annotations

import urllib.request
from pathlib import Path
from typing import Any

import pytest

from saturn_airflow import tracking
from saturn_airflow.model.plan import Assignment, Plan
from saturn_airflow.tracking import server

PLAN = Plan("nightly", "makespan", 60.0, 60.0, 1.5, (Assignment("a", "ddp", 2, "local", (0, 1), 0, 60),))
TAGS = {"saturn.sweep": "k"}


@pytest.mark.parametrize("address", ["nonsense://x", "http://127.0.0.1:9", "sqlite:////dev/null/x/mlflow.db"])
def test_an_address_where_nobody_answers_is_no_error(address: str, tmp_path: Path) -> None:
    sweep = tracking.open_sweep(address, "e", "sweep", TAGS, {}, tmp_path / "s", 0)
    job = tracking.open_job(address, sweep, "a", {}, {}, tmp_path / "a")
    job.follow({"event": "step", "step": 1, "epoch": 0, "loss": 1.0})
    assert not job.close()
    assert not sweep.close()
    assert tracking.estimate_store.find(address, ["f"]) == []


def test_links_lead_where_people_open_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        server.run_url("http://ann:secret@mlflow:5000", "1", "r")
        == "http://mlflow:5000/#/experiments/1/runs/r?workflowType=machine_learning"
    )
    assert server.run_url("sqlite:////state/mlflow.db", "1", "r") is None
    monkeypatch.setenv(server.SHOWN_VARIABLE, "https://mlflow.example.com/")
    shown = "https://mlflow.example.com/#/experiments/1/runs/r?workflowType=machine_learning"
    assert server.run_url("http://mlflow:5000", "1", "r") == shown


@pytest.mark.services
def test_the_url_is_the_page_of_the_run(shared_server: Any, tmp_path: Path) -> None:
    sweep = tracking.open_sweep(
        shared_server.uri.replace("//", "//user:secret@"), "e", "sweep", TAGS, {}, tmp_path / "sweep"
    )
    assert sweep.url is not None
    assert sweep.url.startswith(shared_server.uri + "/#/experiments/")
    assert sweep.url.endswith(f"/runs/{sweep.id}?workflowType=machine_learning")
    with urllib.request.urlopen(sweep.url, timeout=30) as page:
        assert page.status == 200
    written = [file.read_text() for file in (tmp_path / "sweep").rglob("*") if file.is_file()]
    assert not any("secret" in text for text in written)


@pytest.mark.slow
def test_an_embedded_store_has_no_page_and_its_artifacts_lie_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    uri = tracking.resolve_uri(tmp_path / "state")
    sweep = tracking.open_sweep(uri, "e", "sweep", TAGS, {}, tmp_path / "sweep")
    sweep.log_plan(PLAN)
    sweep.log_chart(PLAN)
    assert sweep.id is not None
    assert sweep.url is None
    assert (tmp_path / "state" / "mlflow.db").is_file()
    assert len(list((tmp_path / "state" / "mlartifacts").rglob("plan.json"))) == 1
    assert not (tmp_path / "mlruns").exists()


def test_mlflows_own_setting_wins_over_the_embedded_store(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow.example:5000")
    assert tracking.resolve_uri(tmp_path) == "http://mlflow.example:5000"
