"""Whose runs a boundary leaves alone: who trains where it stays, and who is next in the line behind it."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from saturn_airflow import HParams, Job
from saturn_airflow.deciding import next_round
from saturn_airflow.deciding.next_round import situation_of
from saturn_airflow.launch import leases, progress, runs
from saturn_airflow.model.entries import PlanEntry
from saturn_airflow.model.plan import Place, Plan
from saturn_airflow.planning.online.adoption import Adoption

JOB = Job("next", "torch.nn:Linear", "torch.utils.data:DataLoader", hparams=HParams(batches=1))
PLAN = Plan("makespan", "makespan", 10.0, 0.0, 0.0, ())


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[Any]:
    """A run whose device another holds."""
    folder = tmp_path / "leases"
    with leases.acquire(["n-cpu0"], "one that trains", folder=folder):
        run = runs.start(
            runs.RunSpec(
                job=JOB,
                technique="single",
                folder=str(tmp_path / "next"),
                node="n",
                slots=2,
                devices=1,
                device_ids=(0,),
                kind="cpu",
                leases_folder=str(folder),
            )
        )
        deadline = time.monotonic() + 60
        while "waiting" not in _events(run):
            assert time.monotonic() < deadline, run.log.read_text()
            time.sleep(0.05)
        yield progress.of(tmp_path / "next")
        run.kill()


def _events(run: Any) -> Any:
    path = run.folder / "events.jsonl"
    return path.read_text() if path.exists() else ""


def staying(waiting: Any, moved: Any = (), **changed: Any) -> Any:
    usual = {"technique": "single", "devices": 1, "node": "n", "device_ids": (0,), "after": ("first",)}
    entry = PlanEntry(
        job=JOB,
        start=0.0,
        end=1.0,
        kind="cpu",
        fingerprint="f",
        attempt=100.0,
        position=1,
        **{**usual, **changed},
    )
    so_far = {"first": progress.Progress(training=True), "next": waiting}
    return next_round.staying([entry], so_far, Adoption(PLAN, True, 0.0, 0.0, moved, math.inf))


@pytest.mark.slow
def test_who_waits_behind_one_that_stays_keeps_its_place_in_the_line(waiting: Any) -> None:
    assert waiting.alive
    assert not waiting.training
    assert staying(waiting) == {"first", "next"}
    assert staying(waiting, after=()) == {"first", "next"}


@pytest.mark.slow
def test_who_is_to_go_elsewhere_or_after_others_leaves_the_line(waiting: Any) -> None:
    assert staying(waiting, device_ids=(1,)) == {"first"}
    assert staying(waiting, technique="ddp") == {"first"}
    assert staying(waiting, after=("first", "another")) == {"first"}
    assert staying(waiting, moved=("first",)) == set()


@pytest.mark.slow
def test_a_job_that_evaluates_after_its_last_batch_is_not_forgotten(waiting: Any) -> None:
    """Nor one that was killed then: only a job that has finished, or is at its rung, is left out."""
    at_end = {
        "ends": dataclasses.replace(waiting, steps=10, total=10, training=True),
        "killed": progress.Progress(steps=10, total=10, status="lost"),
        "halfway": progress.Progress(steps=5, total=10, status="stopped"),
        "at its rung": progress.Progress(steps=5, total=10, status="stopped"),
    }
    found = situation_of(at_end, {"ends": 1.0, "killed": 1.0, "halfway": 1.0, "at its rung": 0.5})
    assert found.left.keys() == {"ends", "killed", "halfway"}
    assert 0 < found.left["ends"] == found.left["killed"] < 0.01 < found.left["halfway"]
    assert found.running == {"ends": Place("single", 1, "n", (0,))}
