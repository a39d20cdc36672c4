"""What a job's code leaves behind ends with its run, wherever it went."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from running import small_job, spec_for

from saturn_airflow.launch import leases, runs

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("load_model", ["daemon", "server"])
@pytest.mark.parametrize(("loss", "status"), [("squared", "finished"), ("broken_loss", "failed")])
def test_a_process_that_left_the_group_of_its_run_is_ended_and_told_of(
    load_model: str, loss: str, status: str, tmp_path: Path
) -> None:
    """It may hold the devices: the next job waited for one that had ended."""
    note = tmp_path / "pid"
    job = replace(small_job(loss), load_model=f"small_jobs:{load_model}", model_args={"note": str(note)})
    run = runs.start(spec_for(tmp_path, job))
    end = run.wait()
    assert end["status"] == status, end
    left = int(note.read_text())
    gone = not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE
    if not gone:
        os.kill(left, 9)
    assert gone, "it was left running"
    assert leases.holders(tmp_path / "leases") == {}
    warnings = [event["message"] for event in run.so_far() if event["event"] == "warning"]
    assert any("left processes behind, which were ended" in message for message in warnings), warnings


def test_what_ends_by_itself_is_not_kept_until_the_run_ends(tmp_path: Path) -> None:
    """A job that starts a program each step would fill the kernel's table of processes."""
    run = runs.start(spec_for(tmp_path, small_job("in_background", batches=150)))
    supervisor = psutil.Process(int((run.folder / "alive").read_text()))
    most = 0
    for event in run.events(poll=0.02):
        if event["event"] == "step" and event["step"] % 10 == 0:
            children = supervisor.children()
            most = max(most, sum(child.status() == psutil.STATUS_ZOMBIE for child in children))
    assert event["status"] == "finished", event
    assert most < 100, "of 150 that were started"


@pytest.mark.parametrize("forks", [True, False], ids=["forked", "new interpreter"])
@pytest.mark.parametrize("load_model", ["daemon", "server"])
def test_a_process_that_left_the_group_of_its_run_is_ended_where_the_supervisor_is_killed(
    load_model: str, forks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is forked has the files by which devices are held."""
    if not forks:
        monkeypatch.setattr("saturn_airflow.launch.fork_server.start", lambda *_: None)
    note = tmp_path / "pid"
    job = small_job(batches=10**6)
    job = replace(job, load_model=f"small_jobs:{load_model}", model_args={"note": str(note)})
    run = runs.start(spec_for(tmp_path, job))
    next(event for event in run.events() if event["event"] == "step")
    supervisor = psutil.Process(int((run.folder / "alive").read_text()))
    processes = [psutil.Process(int(note.read_text())), *supervisor.children(recursive=True)]
    above = supervisor.parent()
    supervisor.kill()
    _, left = psutil.wait_procs([*processes, *([above] if above else [])], timeout=10)
    for process in left:
        process.kill()
    assert left == []
    assert leases.holders(tmp_path / "leases") == {}


def test_a_rank_that_is_held_up_ends_where_all_above_it_are_killed(tmp_path: Path) -> None:
    """It would hold its devices and its job for ever, since nobody is there to end it."""
    run = runs.start(spec_for(tmp_path, small_job("slow", batches=10**6)))
    next(event for event in run.events() if event["event"] == "step")
    supervisor = psutil.Process(int((run.folder / "alive").read_text()))
    ranks, above = supervisor.children(recursive=True), supervisor.parent()
    for process in ranks:
        process.suspend()
    assert above is not None
    above.kill()
    supervisor.kill()
    _, left = psutil.wait_procs(ranks, timeout=10)
    for process in left:
        process.kill()
    assert left == []
    assert leases.holders(tmp_path / "leases") == {}
