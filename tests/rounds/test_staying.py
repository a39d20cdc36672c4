"""Whose runs a boundary leaves alone: who trains where it stays, and who is next in the line behind it."""

from __future__ import annotations

import math
import time

import pytest

from saturn_airflow import HParams, Job
from saturn_airflow.operators.round_plan import _staying
from saturn_airflow.plan import Plan
from saturn_airflow.planning.adoption import Decision
from saturn_airflow.training import leases, progress, runs

PLAN = Plan("makespan", "makespan", 10.0, 0.0, 0.0, ())


@pytest.fixture
def waiting(tmp_path):
    """A run whose device another holds."""
    job = Job("next", "torch.nn:Linear", "torch.utils.data:DataLoader", hparams=HParams(batches=1))
    folder = tmp_path / "leases"
    with leases.acquire(["n-cpu0"], "one that trains", folder=folder):
        run = runs.start(
            runs.RunSpec(
                job=job,
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


def _events(run):
    path = run.folder / "events.jsonl"
    return path.read_text() if path.exists() else ""


def staying(waiting, moved=(), **changed):
    entry = {
        "name": "next",
        "technique": "single",
        "devices": 1,
        "node": "n",
        "device_ids": [0],
        "after": ["first"],
        **changed,
    }
    so_far = {"first": progress.Progress(training=True), "next": waiting}
    return _staying([entry], so_far, Decision(PLAN, True, 0.0, 0.0, moved, math.inf))


def test_who_waits_behind_one_that_stays_keeps_its_place_in_the_line(waiting):
    assert waiting.alive
    assert not waiting.training
    assert staying(waiting) == {"first", "next"}
    assert staying(waiting, after=[]) == {"first", "next"}


def test_who_is_to_go_elsewhere_or_after_others_leaves_the_line(waiting):
    assert staying(waiting, device_ids=[1]) == {"first"}
    assert staying(waiting, technique="ddp") == {"first"}
    assert staying(waiting, after=["first", "another"]) == {"first"}
    assert staying(waiting, moved=("first",)) == set()
