"""`saturn demo` from the wheel, in an empty folder: from nothing to trained models, nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import mlflow
import psutil
import pytest

pytestmark = [pytest.mark.services, pytest.mark.timeout(900)]
JOBS = 8


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory, wheel_bin: Path) -> Any:
    """What `saturn demo --keep` printed, what its UIs answered, and its exit status after Ctrl-C."""
    folder = tmp_path_factory.mktemp("demo")
    state = folder / ".saturn"
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "SATURN"))}
    process = subprocess.Popen(
        [str(wheel_bin / "saturn"), "demo", "--keep"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**clean, "COLUMNS": "120"},
    )
    watchdog = threading.Timer(720, process.kill)
    watchdog.start()
    lines: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if "stay up" in line:
            break
    printed = "".join(lines)
    answers = {}
    alive = left_of(state)
    if process.poll() is None:
        urls = dict(re.findall(r"^(Airflow|MLflow) +(http://[\d.:]+)/", printed, re.MULTILINE))
        answers = {name: httpx.get(url, follow_redirects=True).status_code for name, url in urls.items()}
        process.send_signal(signal.SIGINT)
    printed += process.stdout.read()
    status = process.wait()
    watchdog.cancel()
    return {"state": state, "printed": printed, "status": status, "answers": answers, "alive": alive}


def left_of(state: Path) -> set[str]:
    """Names of live processes that the demo started.

    Those of its services' sessions, and those that left them, such as trainings, but carry the folder in
    their environment. Airflow's overwrite theirs with a title.
    """
    services = {int(note.read_text().split()[0]) for note in (state / "logs").glob("*.pid")}
    found = set()
    for process in psutil.process_iter(["name"]):
        with suppress(psutil.Error, ProcessLookupError):
            own = services & {os.getsid(process.pid), os.getpgid(process.pid)}
            if own or str(state) in " ".join(process.environ().values()):
                found.add(process.info["name"])
    return found


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
