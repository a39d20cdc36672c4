"""What jobs name as their metrics, and what is said of what is none."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_loop import job, launch, request

from saturn_airflow.launch import progress, runs
from saturn_airflow.launch.request import Measure

pytestmark = pytest.mark.ranks

EVALUATED: dict[str, Any] = {"load_eval_dataloader": "loop_jobs:points"}
#: What is wrong, and what is said of it.
WRONG = {
    "crash": "metric 'm' (metric_jobs:crash) raised ZeroDivisionError: no classes",
    "each_sample": "metric 'm' (metric_jobs:each_sample) returned a Tensor of shape (",
    "words": "metric 'm' (metric_jobs:words) returned a str; return the mean over the samples",
    "makes_nothing": "it made a int, which has no update, compute and reset",
    "constant": "metric 'm' (metric_jobs:constant) is of type int",
    "Wants": "missing 1 required positional argument: 'classes'",
}


def test_what_is_no_metric_is_told_of_in_the_trial(tmp_path: Path) -> None:
    requests = [
        request(job(metrics={"m": f"metric_jobs:{name}"}, **EVALUATED), measure=Measure(0, 1))
        for name in WRONG
    ]
    (told,) = launch(requests)
    for name, one in zip(WRONG, told, strict=True):
        assert one.get("error") == "JobError", (name, one)
        assert WRONG[name] in one["says"]


def test_objects_begin_anew_with_each_evaluation(tmp_path: Path) -> None:
    names = {"own": "metric_jobs:Sum", "shared": "metric_jobs:shared", "nothing": "metric_jobs:nothing"}
    several = job(
        {"epochs": 2, "batch_size": 8}, metrics={**names, "error": "metric_jobs:error"}, **EVALUATED
    )
    ((told,),) = launch([request(several, tmp_path)])
    assert "says" not in told, told["says"]
    first, second = (event["metrics"] for event in told["events"] if event["event"] == "eval")
    assert first["own"] == first["shared"] == second["own"] == second["shared"]
    assert first["nothing"] != first["nothing"], "0 of 0 is no number"
    assert second["error"] < first["error"]


def test_metrics_go_on_from_the_checkpoint(tmp_path: Path) -> None:
    measured = job({"epochs": 2, "batch_size": 8}, metrics={"error": "metric_jobs:error"}, **EVALUATED)
    ((whole,),) = launch([request(measured, tmp_path / "whole")])
    evaluated = [event["metrics"]["error"] for event in whole["events"] if event["event"] == "eval"]
    steps = whole["result"]["batches_per_epoch"]
    ((half,),) = launch([request(measured, tmp_path / "halves", batch_count=steps + 1)])
    assert half["result"]["metrics"] == {"error": evaluated[0]}
    ((rest,),) = launch([request(measured, tmp_path / "halves")])
    assert rest["result"]["metrics"] == {"error": pytest.approx(evaluated[1], rel=1e-12)}
    # What a version without metrics has saved is gone on with.
    for manifest in (tmp_path / "halves").glob("checkpoints/*/manifest.json"):
        saved = json.loads(manifest.read_text())
        assert saved["extra"]["own_metrics"]


def test_the_next_plan_reads_them_from_the_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    event = {"event": "eval", "epoch": 1, "step": 8, "eval_loss": 0.5, "metrics": {"f1": 0.25, "none": None}}

    class Run:
        spec, end = SimpleNamespace(technique="single", devices=1, kind="cpu", total_batches=None), None
        folder = tmp_path

        def so_far(self) -> list[dict[str, object]]:
            return [event]

    monkeypatch.setattr(runs, "all_of", lambda folder: [Run()])
    history = progress.of(tmp_path).history
    assert history["eval_loss"] == {2.0: 0.5}
    assert history["f1"] == {2.0: 0.25}
