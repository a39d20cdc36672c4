"""Jobs whose code does as it likes with its own output."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from running import small_job, spec_for

from saturn_airflow.launch import runs

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("load_model", ["replaced_output", "closed_output"])
@pytest.mark.parametrize(("loss", "status"), [("squared", "finished"), ("broken_loss", "failed")])
def test_a_job_that_replaces_or_closes_its_output_ends_as_it_should(
    load_model: str, loss: str, status: str, tmp_path: Path
) -> None:
    """Its process ended by an error in writing out what was printed, and went on as a second supervisor."""
    job = replace(small_job(loss), load_model=f"small_jobs:{load_model}")
    run = runs.start(spec_for(tmp_path, job))
    end = run.wait()
    assert end["status"] == status, end
    assert [event["event"] for event in run.so_far()].count("end") == 1
