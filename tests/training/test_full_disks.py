"""Disks that are full: what trains waits for room and is exact, and no job is to blame."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from running import small_job, spec_for

from saturn_airflow.launch import failures, leases, past_runs, runs, users_code
from saturn_airflow.launch.giving_way import GivingWay
from saturn_airflow.launch.lease_folder import LeaseFolder
from saturn_airflow.launch.ledger import Ledger
from saturn_airflow.launch.run_spec import RunSpec
from saturn_airflow.launch.runs import Run
from saturn_airflow.launch.turn_at_node import Sharing
from saturn_airflow.model import disks
from saturn_airflow.model.active_sweep import ActiveSweep
from saturn_airflow.model.claims import claim_of
from saturn_airflow.model.errors import DiskError, JobError
from saturn_airflow.model.sharing import SharedSweep
from saturn_airflow.training.shared_folder import DiskOfCheckpointsError

BATCHES = 40


def _spec(disk: Path, batches: int = BATCHES, **settings: Any) -> RunSpec:
    """A job on ``disk``, whose devices are leased elsewhere."""
    settings = {"leases_folder": str(disk.parent / "leases"), "checkpoint_batches": 10, **settings}
    return spec_for(disk, small_job("slow", batches=batches), **settings)


def _until(run: Run, kind: str) -> None:
    deadline = time.monotonic() + 60
    while not any(event["event"] == kind for event in run.so_far()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.ranks
def test_a_run_is_not_started_and_leaves_nothing(small_disk: Any) -> None:
    small_disk.fill()
    spec = _spec(small_disk.path)
    with pytest.raises(
        DiskError, match=rf"{spec.folder}/runs can't .*No space.*{small_disk.path} has 0 kB of 8.4 MB left"
    ):
        runs.start(spec)
    assert list((Path(spec.folder) / "runs").iterdir()) == []
    small_disk.free()
    assert runs.start(spec).wait()["status"] == "finished"


@pytest.mark.ranks
def test_who_can_not_write_a_checkpoint_is_lost_with_its_disk_and_goes_on_later(small_disk: Any) -> None:
    spec = _spec(small_disk.path, checkpoint_batches=1000)
    run = runs.start(spec)
    _until(run, "step")
    small_disk.fill()
    deadline = time.monotonic() + 60
    while run.is_alive() and not list(Path(spec.folder, "checkpoints").glob(".saving-*")):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    time.sleep(1.0)  # its last words wait for room
    small_disk.free()
    end = run.wait()
    assert (end["status"], end.get("whose")) == ("lost", "node"), end
    assert f"no checkpoint can be written to {spec.folder}" in end["reason"]
    assert past_runs.failures(spec.folder) == 0
    assert runs.start(spec).wait()["result"]["steps"] == BATCHES


@pytest.mark.ranks
def test_in_mid_training_a_checkpoint_and_the_events_wait_for_room(small_disk: Any) -> None:
    spec = _spec(small_disk.path, batches=4 * BATCHES)
    run = runs.start(spec)
    _until(run, "checkpoint")
    small_disk.fill()
    time.sleep(1.0)
    small_disk.free()
    assert run.wait()["status"] == "finished"
    told = run.so_far()
    assert [event["step"] for event in told if event["event"] == "step"] == list(range(1, 4 * BATCHES + 1))
    assert any("No space left" in event["message"] for event in told if event["event"] == "warning")


@pytest.mark.ranks
def test_a_trial_that_meets_a_full_disk_says_nothing_of_its_job(small_disk: Any) -> None:
    small_disk.fill()
    with pytest.raises(DiskError, match=r"0 kB of 8\.4 MB left"):
        runs.start(_spec(small_disk.path, mode="trial"))


def test_a_supervisor_that_left_without_a_word_is_lost_with_its_disk(small_disk: Any) -> None:
    folder = small_disk.path / "runs" / "0001"
    folder.mkdir(parents=True)
    for name in ("spec.json", "alive"):
        (folder / name).touch()
    end = Run(folder).end
    assert end is not None
    assert end.get("whose") is None
    small_disk.fill()
    end = Run(folder).end
    assert end is not None
    assert end["whose"] == "node"
    assert "has 0 kB of 8.4 MB left" in end["reason"]


def job_error(cause: OSError) -> JobError:
    """What a job's code that raises ``cause`` is told as."""
    with pytest.raises(JobError) as raised, users_code.of_the_job("the model"):
        raise cause
    return raised.value


@pytest.mark.parametrize(
    ("error", "whose"),
    [
        (OSError(28, "No space left on device", "/proc/self/x"), "node"),
        (OSError(30, "Read-only file system"), "technique"),
        (RuntimeError("can't open cache: Read-only file system (os error 30)"), "technique"),
        (RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"), "node"),
        (DiskOfCheckpointsError("no checkpoint can be written"), "node"),
        (OSError(13, "Permission denied"), "technique"),
        (JobError("its own file: No space left on device"), "job"),
        (job_error(OSError(5, "Input/output error", "/proc/self/x")), "node"),
        (job_error(OSError(28, "No space left on device")), "node"),
        (job_error(OSError(30, "Read-only file system")), "job"),
        (job_error(OSError(2, "No such file or directory")), "job"),
    ],
)
def test_whose_fault_it_is(error: Exception, whose: str) -> None:
    found = failures.describe(error)
    if str(error).startswith("the model raised OSError: [Errno 28]"):
        assert "No space left on device; the disk at" in found.reason
    assert (found.whose, found.status) == (whose, "lost" if whose == "node" else "failed")


def test_what_the_ledger_knew_stays(small_disk: Any) -> None:
    ledger = Ledger(small_disk.path)
    sweep = ActiveSweep(
        dag_id="d",
        run_id="r",
        folder="sweeps/d/r/sweep",
        made=1.0,
        nodes=(),
        sweep=SharedSweep(name="d/r/sweep", jobs=(), arrived=1.0, alone=1.0),
    )
    ledger.write(sweep)
    small_disk.fill()
    with pytest.raises(OSError, match="No space left"):
        ledger.write(sweep)
    assert [found.key for found in ledger.sweeps()] == [sweep.key]


def test_a_file_is_whole_or_as_it_was(small_disk: Any) -> None:
    note = small_disk.path / "note.json"
    disks.write_whole(note, json.dumps({"a": 1}))
    small_disk.fill()
    with pytest.raises(OSError, match="No space left"):
        disks.write_whole(note, "x" * 10_000)
    assert json.loads(note.read_text()) == {"a": 1}
    assert [path.name for path in small_disk.path.iterdir() if path.name != "filler"] == ["note.json"]


def test_leases_whose_disk_fails_end_no_training_and_cost_who_waits_no_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the kernel mounts a disk anew without the right to write, for its errors."""
    facts = SharedSweep("a", (), arrived=0.0, alone=1e9)
    mine = claim_of(facts, "runs", "single", {("single", 1): (100.0, 2.0)}, made=1.0)
    sharing = Sharing(mine, ("d0",))
    lease = leases.acquire(["d0"], "runs", folder=tmp_path, sharing=sharing)
    stay = GivingWay(sharing, lease, tmp_path)
    waiter, really = leases.Waiter(["d0"], "waits", folder=tmp_path), os.open

    def read_only(path: Any, flags: int, *arguments: Any, **more: Any) -> int:
        if flags & os.O_RDWR:
            raise OSError(30, "Read-only file system")
        return really(path, flags, *arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", read_only)
        stay._looked_at -= 10
        assert not stay.asked()
        stay.count_use()
        with pytest.raises(DiskError, match=f"{tmp_path} can't be written") as raised:
            waiter.take()
        assert failures.describe(raised.value).whose == "node"
    assert waiter.take() is None, "it is held"
    lease.release()
    assert waiter.take() is not None


def test_who_finds_no_room_to_wait_is_tried_again(small_disk: Any) -> None:
    LeaseFolder(small_disk.path / "leases")
    small_disk.fill()
    with pytest.raises(DiskError, match="No space left"):
        leases.Waiter(["d0"], "waits", folder=small_disk.path / "leases")
