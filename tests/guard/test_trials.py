"""Trials and trainings go through the guard, whatever the technique's own search does."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from checking import job

from saturn_airflow import library
from saturn_airflow.launch import runs
from saturn_airflow.launch.request import Measure
from saturn_airflow.launch.runs import RunSpec
from saturn_airflow.model import guards
from saturn_airflow.model.cluster import Node
from saturn_airflow.model.estimates import Estimate, Trial
from saturn_airflow.model.folders import TECHNIQUES_VARIABLE
from saturn_airflow.model.jobs import Job
from saturn_airflow.profiling.measure import measure

pytestmark = pytest.mark.ranks

HERE = Path(__file__).parent


def version() -> str:
    """That of the technique's file."""
    with mock.patch.dict(os.environ, {TECHNIQUES_VARIABLE: str(HERE / "techniques")}):
        return library.get("loss_off").version


def tried(tmp_path: Path, a_job: Job, **changes: Any) -> Estimate:
    trial = Trial(job=a_job, technique="loss_off", devices=1, node="here", covers=("cell",), fingerprint="f")
    return measure(
        trial,
        Node("here", devices=1, kind="cpu"),
        folder=tmp_path / "trial",
        leases_folder=str(tmp_path / "leases"),
        technique_folders=(str(HERE / "techniques"),),
        path=(str(HERE),),
        how=Measure(1, 2),
        **changes,
    )


def trained(tmp_path: Path, a_job: Job, **changes: Any) -> tuple[list[str], dict[str, Any]]:
    spec = RunSpec(
        job=a_job,
        technique="loss_off",
        folder=str(tmp_path / "state"),
        node="here",
        kind="cpu",
        slots=1,
        devices=1,
        leases_folder=str(tmp_path / "leases"),
        technique_folders=(str(HERE / "techniques"),),
        path=(str(HERE),),
        **{"parameters": {"off": 0.5}, **changes},
    )
    events = list(runs.start(spec).events())
    return [event["event"] for event in events], events[-1]


def test_a_candidate_that_is_refused_lets_the_next_one_be_tried(tmp_path: Path) -> None:
    estimate = tried(tmp_path, job(hparams={"batches": 5}))
    assert estimate.works
    assert estimate.parameters == {"off": 0.0}
    assert estimate.verdicts == {guards.mark(job(), version()): "exact"}


def test_where_all_differ_the_estimate_says_so(tmp_path: Path) -> None:
    a_job = job(hparams={"batches": 5, "batch_size": 5})
    estimate = tried(tmp_path, a_job)
    assert estimate.reason is not None
    assert estimate.reason.startswith("loss_off x 1 changes the result: the loss of step 1 is")
    assert not estimate.passing
    assert estimate.verdicts == {guards.mark(a_job, "1"): f"refused: {estimate.reason}"}
    trusting = job(hparams={"batches": 5, "batch_size": 5}, trust=["loss_off"])
    estimate = tried(tmp_path, trusting, alike=[a_job])
    assert estimate.works
    (verdict,) = estimate.verdicts.values()
    assert verdict.startswith("refused: "), "whoever does not trust it is told"


def test_nothing_is_trained_that_was_not_compared(tmp_path: Path) -> None:
    a_job = job(hparams={"batches": 2})
    for _ in range(2):
        names, end = trained(tmp_path, a_job)
        assert end["status"] == "changes_result"
        assert "the loss of step 1 is" in end["reason"]
        assert "step" not in names
    names, end = trained(tmp_path, job(hparams={"batches": 2}, trust=["loss_off"]))
    assert (end["status"], end["result"]["verdict"]) == ("finished", "trusted")


def test_what_is_known_is_not_compared_again(tmp_path: Path) -> None:
    a_job = job(hparams={"batches": 1})
    state = tmp_path / "state"
    right = {"off": 0.0}
    names, end = trained(tmp_path, a_job, verdict="exact", parameters=right)
    assert end["status"] == "finished"
    assert "guard" not in names
    here = end["result"]["own_code"]
    assert here == guards.own_code(a_job) != ""
    for own_code, again in ((here, False), ("edited since", True)):
        names, end = trained(tmp_path / own_code, a_job, verdict="exact", own_code=own_code, parameters=right)
        assert (end["status"], "guard" in names) == ("finished", again), own_code
    key = f"{guards.mark(a_job, version())} loss_off 1 {json.dumps(right)}"
    (state / "verdicts.json").write_text(json.dumps({key: "distribution"}))
    names, end = trained(tmp_path, a_job, parameters=right)
    assert end["status"] == "finished"
    assert "guard" not in names
    _, end = trained(tmp_path, job(hparams={"batches": 1}, exact=True), parameters=right)
    assert end["status"] == "does_not_fit"
    assert "is not exact (distribution), as Job(exact=True) wants" in end["reason"]
