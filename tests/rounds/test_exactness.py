"""A job that every round moves trains as one that is left alone: same steps, same losses, in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from saturn_airflow import HParams, Job
from saturn_airflow.launch import progress, runs

pytestmark = pytest.mark.ranks

MODELS = Path(__file__).parents[1] / "airflow" / "dags"
JOB = Job(
    "moved",
    "slow_later:linear",
    "slow_later:paced",
    "slow_later:loss",
    HParams(batch_size=16, epochs=2, lr=0.05, precision="float64"),
    data_args={"samples": 400, "first": 0.0, "later": 0.0},
    load_eval_dataloader="slow_later:held_out",
)
#: Where each of five rounds trains it, and for how many batches.
ROUNDS = [("single", 1, 9), ("ddp", 2, 14), ("fsdp", 2, 10), ("single", 1, 1), ("ddp", 2, None)]


def train(folder: Any, technique: Any, devices: Any, batches: Any) -> Any:
    spec = runs.RunSpec(
        job=JOB,
        technique=technique,
        folder=str(folder),
        node="exact",
        slots=2,
        devices=devices,
        kind="cpu",
        batch_count=batches,
        leases_folder=str(folder / "leases"),
        path=(str(MODELS),),
    )
    return runs.start(spec).wait()


def losses(folder: Any) -> Any:
    events = [
        json.loads(line)
        for run in runs.all_of(folder)
        for line in (run.folder / "events.jsonl").read_text().splitlines()
    ]
    return [(e["step"], e["loss"]) for e in events if e["event"] == "step"]


def test_five_rounds_under_three_techniques_give_the_losses_of_one(tmp_path: Path) -> None:
    alone, moved = tmp_path / "alone", tmp_path / "moved"
    assert train(alone, "single", 1, None)["status"] == "finished"
    ends = [train(moved, *where)["status"] for where in ROUNDS]
    assert ends == ["stopped"] * 4 + ["finished"]
    assert [step for step, _ in losses(moved)] == list(range(1, 51))
    assert dict(losses(moved)) == pytest.approx(dict(losses(alone)), rel=1e-9)

    one, five = progress.of(alone), progress.of(moved)
    assert (five.steps, five.total, five.per_epoch, five.share) == (50, 50, 25, 1.0)
    assert five.status == "finished"
    assert five.alive is None
    assert {(s.technique, s.devices) for s in five.speeds} == {("single", 1), ("ddp", 2), ("fsdp", 2)}
    for metric in ("eval_loss", "epoch_loss"):
        assert set(one.history[metric]) == {1.0, 2.0}
        assert five.history[metric] == pytest.approx(one.history[metric], rel=1e-9)


def test_a_job_that_was_never_run_has_made_no_progress(tmp_path: Path) -> None:
    nothing = progress.of(tmp_path)
    assert (nothing.steps, nothing.share, nothing.status, nothing.alive) == (0, 0.0, None, None)
