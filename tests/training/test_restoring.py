"""The folder of state, copied while a job trains and put back after all was lost."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from running import small_job, spec_for

from saturn_airflow.launch import runs

pytestmark = pytest.mark.ranks


def losses(events: list[dict[str, Any]]) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in events if event["event"] == "step"}


def test_a_copy_of_home_made_while_a_job_trains_is_enough_to_go_on(tmp_path: Path) -> None:
    job = small_job("slow", batches=40)
    straight = list(runs.start(spec_for(tmp_path / "straight", job)).events())
    home, copy = tmp_path / "home", tmp_path / "copy"
    spec = spec_for(home, job, checkpoint_batches=3, leases_folder=str(tmp_path / "leases"))
    run = runs.start(spec)
    saved = 0
    for event in run.events(poll=0.02):
        saved += event["event"] == "checkpoint"
        if saved == 3:
            break
    # As rsync of a backup would, beside those who write.
    shutil.copytree(home, copy, ignore=shutil.ignore_patterns(".saving-*", ".removing-*"))
    run.kill()
    shutil.rmtree(home)
    copy.rename(home)
    assert [one.is_alive() for one in runs.all_of(spec.folder)] == [False], "nothing in a copy is locked"
    *events, end = runs.start(spec).events()
    assert end["status"] == "finished"
    (start,) = [event for event in events if event["event"] == "start"]
    assert 6 <= start["step"] < 40
    expected = losses(straight)
    assert losses(events) == {step: expected[step] for step in range(start["step"] + 1, 41)}
