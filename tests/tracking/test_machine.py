"""The machine's metrics beside those of training."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from saturn_airflow import tracking
from saturn_airflow.tracking import machine


def step(number: int, moment: float) -> dict[str, Any]:
    return {"event": "step", "step": number, "epoch": 0, "loss": 1.0, "time": moment}


@pytest.mark.slow
def test_a_job_that_trains_has_the_machines_metrics_and_its_retry_counts_on(
    embedded_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv(machine.INTERVAL, "0.05")
    sweep = tracking.open_sweep(
        embedded_uri, "machine", "s", {"saturn.sweep": str(tmp_path)}, {}, tmp_path, 0
    )
    steps: list[list[int]] = []
    for attempt in range(2):
        job = tracking.open_job(embedded_uri, sweep, "a", {}, {}, tmp_path / "a")
        job.follow(step(attempt, time.time()))
        deadline = time.monotonic() + 60
        while (job._outbox.last("metrics", "machine") or {}).get("step", -1) < 3 * (attempt + 1):
            assert time.monotonic() < deadline, "no metrics of the machine"
            time.sleep(0.05)
        assert job.close()
        history = MlflowClient(tracking_uri=embedded_uri).get_metric_history(
            str(job.id), "system/system_memory_usage_percentage"
        )
        steps.append([metric.step for metric in history])
        assert all(0 < metric.value <= 100 for metric in history)
    assert steps[1] == list(range(len(steps[1])))
    assert len(steps[1]) > len(steps[0])
    metrics = MlflowClient(tracking_uri=embedded_uri).get_run(str(job.id)).data.metrics
    assert {"system/cpu_utilization_percentage", "system/disk_usage_percentage"} <= set(metrics)


@pytest.mark.parametrize(("setting", "late"), [("false", 0.0), ("true", 3600.0)])
def test_they_are_left_out_where_nobody_wants_them_or_training_was_long_ago(
    setting: str, late: float, embedded_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(machine.SWITCH, setting)
    before = set(threading.enumerate())
    sweep = tracking.open_sweep(
        embedded_uri, "machine", "s", {"saturn.sweep": str(tmp_path)}, {}, tmp_path, 0
    )
    job = tracking.open_job(embedded_uri, sweep, "a", {}, {}, tmp_path / "a")
    job.follow(step(0, time.time() - late))
    started = set(threading.enumerate()) - before
    assert not [thread for thread in started if thread.name == "saturn-machine"]
    job.close()
