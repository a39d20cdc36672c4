"""A job's code may fork: what comes back from it trains once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from running import small_job, spec_for

from saturn_airflow.launch import runs

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize(
    ("ends", "technique", "devices", "words"),
    [
        ("returns", "single", 1, "a process that the job's code forked"),
        ("raises", "single", 1, "ValueError: what only the copy meets"),
        ("raises", "ddp", 2, "ValueError: what only the copy meets"),
        ("exits", "single", 1, ""),
    ],
)
def test_a_copy_of_a_rank_neither_trains_nor_fails_the_job(
    ends: str, technique: str, devices: int, words: str, tmp_path: Path
) -> None:
    job = replace(small_job(batches=20), load_model="small_jobs:forking", model_args={"ends": ends})
    run = runs.start(spec_for(tmp_path, job, technique, devices, checkpoint_batches=1))
    end = run.wait()
    assert end["status"] == "finished", end
    told = [(event["event"], event["step"]) for event in run.so_far() if "step" in event]
    assert len(told) == len(set(told)), "two have told of one step"
    assert not [event for event in run.so_far() if event["event"] == "warning"]
    assert words in run.log.read_text()
