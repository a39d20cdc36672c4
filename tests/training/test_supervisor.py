"""Runs from start to end, and what is left when a part of them dies."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from running import small_job, spec_for
from safetensors.torch import load_file

from saturn_airflow.launch import devices, leases, past_runs, runs
from saturn_airflow.launch.devices import Device
from saturn_airflow.launch.request import DoesNotFit
from saturn_airflow.launch.runs import Run, RunSpec
from saturn_airflow.launch.supervisor import Supervisor
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.jobs import Job

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parent.parent.parent


def finish(spec: RunSpec) -> tuple[list[str], dict[str, Any], list[dict[str, Any]]]:
    """Run to the end: the names of the events without repetition, the end, and all events."""
    run = runs.start(spec)
    events = list(run.events(poll=0.02))
    assert not run.is_alive()
    names = [name for name, _ in itertools.groupby(event["event"] for event in events)]
    return names, events[-1], events


def until(run: Run, name: str, count: int = 1) -> list[dict[str, Any]]:
    """Follow a run until an event has come ``count`` times."""
    seen = []
    for event in run.events(poll=0.02):
        assert event["event"] != "end", event
        seen.append(event)
        count -= event["event"] == name
        if count == 0:
            break
    return seen


def family(run: Run) -> list[psutil.Process]:
    """All processes of a run, its supervisor first."""
    supervisor = psutil.Process(int((run.folder / "alive").read_text()))
    above = supervisor.parent()
    assert above is not None
    return [supervisor, *supervisor.children(recursive=True), above]


def open_files(process: psutil.Process) -> list[str]:
    return [os.readlink(path) for path in Path(f"/proc/{process.pid}/fd").iterdir()]


def losses(events: list[dict[str, Any]]) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in events if event["event"] == "step"}


def test_a_spec_survives_json(tmp_path: Path) -> None:
    spec = spec_for(tmp_path, small_job(), devices=2, device_ids=(0, 1), priority=(3.5, 2))
    assert RunSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"devices": 3}, "asks for 3 devices; node 'local' has 2"),
        ({"devices": 2, "device_ids": (1,)}, r"device ids \[1\] are not 2 of the 2 of node 'local'"),
        ({"device_ids": (2,)}, r"device ids \[2\] are not 1"),
    ],
)
def test_a_spec_that_cannot_be_right_is_refused(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidSweepError, match=words):
        spec_for(tmp_path, small_job(), **settings)


def test_parts_of_split_gpus_train_no_job_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [Device(number, f"MIG-{number}", f"MIG-{number}") for number in range(2)]
    monkeypatch.setattr(devices, "find", lambda *asked: parts)
    spec = spec_for(tmp_path, small_job(), "ddp", devices=2, device_ids=(0, 1), kind="a100")
    Path(spec.folder).mkdir()
    (tmp_path / "spec.json").write_text(json.dumps(spec.to_dict()))
    with contextlib.ExitStack() as held, pytest.raises(DoesNotFit, match="a process sees but one of them"):
        Supervisor(tmp_path, None)._with_devices(held)


def test_training_from_start_to_end(tmp_path: Path) -> None:
    spec = spec_for(tmp_path, small_job(), "ddp", devices=2, device_ids=(1, 0))
    names, end, events = finish(spec)
    assert names == ["leased", "launched", "start", "step", "looked", "step", "checkpoint", "end"]
    assert events[0]["devices"] == [1, 0]
    assert (end["status"], end["result"]["steps"]) == ("finished", 50)
    assert end["result"]["peak_host_bytes"] > end["result"]["peak_device_bytes"] > 10 << 20
    assert leases.holders(tmp_path / "leases") == {}
    assert past_runs.has_asked(spec.folder, since=math.inf), "it has finished, and needs no further run"


def test_stopping_checkpoints_and_a_further_run_goes_on(tmp_path: Path) -> None:
    _, _, straight = finish(spec_for(tmp_path / "straight", small_job("slow", batches=60), "ddp", devices=2))

    spec = spec_for(tmp_path / "broken", small_job("slow", batches=60), "ddp", devices=2, priority=(5.0, 0))
    assert not past_runs.has_asked(spec.folder, since=5.0)
    run = runs.start(spec)
    events = until(run, "step", 5)
    assert past_runs.has_asked(spec.folder, since=6.0)
    run.stop()
    assert not run.is_alive()
    assert past_runs.has_asked(spec.folder, since=5.0)
    assert not past_runs.has_asked(spec.folder, since=6.0)
    events += run.events()
    end = events[-1]
    assert end["status"] == "stopped"
    assert [e["step"] for e in events if e["event"] == "checkpoint"] == [end["result"]["steps"]]
    assert 5 <= end["result"]["steps"] < 60

    _, end, more = finish(spec)
    assert end["status"] == "finished"
    assert set(losses(events)).isdisjoint(losses(more))
    assert losses(events) | losses(more) == losses(straight)


def test_a_killed_rank_is_started_again_from_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMALL_JOBS_MARK", str(tmp_path / "mark"))
    job = small_job("killed_once", data_args={"workers": 1})
    spec = spec_for(tmp_path, job, "ddp", devices=2, checkpoint_batches=10)
    names, end, events = finish(spec)
    assert (end["status"], end["result"]["steps"]) == ("finished", 50)
    (again,) = [event for event in events if event["event"] == "restarting"]
    assert "rank 0 was killed by SIGKILL" in again["reason"]
    assert [event["step"] for event in events if event["event"] == "start"] == [0, 20]
    assert names.count("leased") == 1, "it never let go of its devices"
    steps = [event for event in events if event["event"] == "step"]
    first = {event["step"]: event["loss"] for event in reversed(steps)}
    assert first == losses(events), "what was trained again came to the same"
    assert leases.holders(tmp_path / "leases") == {}


def test_the_technique_s_own_process_is_started_again_too(tmp_path: Path) -> None:
    spec = spec_for(tmp_path, small_job("slow", batches=40), "ddp", devices=2, checkpoint_batches=5)
    run = runs.start(spec)
    events = until(run, "checkpoint", 2)
    # It is the first that the supervisor launched.
    min(family(run)[1:-1], key=lambda process: process.create_time()).kill()
    events += run.events(poll=0.02)
    assert (events[-1]["status"], events[-1]["result"]["steps"]) == ("finished", 40)
    assert [event["event"] for event in events].count("restarting") == 1


@pytest.mark.parametrize(("every", "status"), [(3, "finished"), (10, "lost")])
def test_a_killed_rank_is_not_started_again_for_ever(every: int, status: str, tmp_path: Path) -> None:
    job = small_job("killed_always", batches=20)
    _, end, events = finish(spec_for(tmp_path, job, checkpoint_batches=every))
    starts = [event["event"] for event in events].count("start")
    assert end["status"] == status, end
    assert (starts > 4) if status == "finished" else (starts == 4)
    if status == "lost":
        assert "rank 0 was killed by SIGSEGV" in end["reason"]
        assert "it was started again 3 times in a row before it came to another checkpoint" in end["reason"]


@pytest.mark.parametrize(
    ("job", "technique", "status", "whose", "words"),
    [
        (small_job("broken_loss"), "ddp", "failed", "job", "the user's own mistake"),
        (small_job("exits"), "ddp", "failed", "job", "small_jobs:exits' called sys.exit(3); return"),
        (small_job("not_a_number"), "ddp", "not_a_number", "job", "nan at step 1"),
        (small_job("hungry"), "ddp", "out_of_memory", "", "memory"),
        (small_job(), "absent", "failed", "technique", "'absent' is not in the library; it has"),
        (small_job(), "two", "failed", "technique", "two.py defines 2 techniques"),
        (small_job(), "no_import", "failed", "technique", "a_module_that_is_not_there"),
    ],
)
def test_how_it_failed_is_told(
    job: Job, technique: str, status: str, whose: str, words: str, tmp_path: Path
) -> None:
    _, end, _ = finish(spec_for(tmp_path, job, technique, devices=2))
    assert (end["status"], end["whose"]) == (status, whose)
    assert words in end["reason"]
    if job.name == "small-broken_loss":
        assert "small_jobs.py" in end["traceback"]
        assert "saturn_airflow" not in end["traceback"].split("small_jobs.py")[1]


def test_a_rank_that_hangs_is_named_with_its_place(tmp_path: Path) -> None:
    _, end, _ = finish(spec_for(tmp_path, small_job("stuck"), "ddp", devices=2, hang_seconds=5))
    assert (end["status"], end["rank"]) == ("hung", 1)
    assert end["reason"] == "rank 1 has not moved for 5 s"
    assert "small_jobs.py" in end["traceback"].splitlines()[1]


def test_a_technique_of_search_and_execute_alone(tmp_path: Path) -> None:
    _, end, _ = finish(spec_for(tmp_path, small_job(), "whole_batch", mode="trial"))
    assert end["status"] == "finished", end
    found = end["result"]
    assert found["parameters"] == {"found": True}
    assert found["seconds_per_batch"] > 0
    spec = spec_for(tmp_path, small_job(), "whole_batch", parameters=found["parameters"])
    names, end, events = finish(spec)
    assert end["status"] == "finished", end
    assert names == ["leased", "step", "end"]
    assert len(losses(events)) == 50
    assert (Path(spec.folder) / "model.pt").exists()
    # What the report chooses by, and what is registered.
    assert end["result"]["loss"] == losses(events)[50]
    assert end["result"]["epoch_loss"] == pytest.approx(sum(losses(events).values()) / 50)
    exported = load_file(Path(end["result"]["model"], "model.safetensors"))
    trained = torch.load(Path(spec.folder) / "model.pt")
    assert all(torch.equal(exported[name], trained[name]) for name in trained)


def test_a_technique_that_stops_by_itself_when_asked(tmp_path: Path) -> None:
    spec = spec_for(tmp_path, small_job("slow", batches=400), "whole_batch", parameters={"found": True})
    run = runs.start(spec)
    until(run, "step", 3)
    run.stop()
    assert run.wait()["status"] == "stopped"
    assert (Path(spec.folder) / "model.pt").exists()


def test_a_technique_with_functions_of_its_own_on_ranks(tmp_path: Path) -> None:
    names, end, events = finish(spec_for(tmp_path, small_job(), "own_ranks", devices=2))
    assert end["status"] == "finished", end
    assert names == ["leased", "launched", "counted", "summed", "warning", "end"]
    assert "left no model, so this job can't be registered" in events[-2]["message"]
    assert [e["sum"] for e in events if e["event"] == "summed"] == [300]


def test_nothing_survives_the_one_who_started_it(tmp_path: Path) -> None:
    starter = tmp_path / "starter.py"
    starter.write_text(
        textwrap.dedent(f"""
        import sys
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from running import small_job, spec_for
        from saturn_airflow.training import runs
        run = runs.start(spec_for(Path({str(tmp_path)!r}), small_job("slow", batches=5000), "ddp", devices=2))
        for event in run.events():
            print(event["event"], run.folder, flush=True)
        """)
    )
    process = subprocess.Popen([sys.executable, starter], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    folder = next(line.split()[1] for line in process.stdout if line.startswith("step"))
    processes = family(Run(Path(folder)))
    assert len(processes) == 4, "supervisor, two ranks, the process above"
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive
    assert leases.holders(tmp_path / "leases") == {}
    end = Run(Path(folder)).wait()
    assert end["status"] == "stopped"
    assert end["result"]["checkpoint"], "it had time to save what it had"


def test_a_job_on_one_device_has_three_processes(tmp_path: Path) -> None:
    run = runs.start(spec_for(tmp_path, small_job("slow", batches=5000)))
    until(run, "step", 3)
    assert len(family(run)) == 3, "supervisor, rank, the process above"
    run.kill()


def test_a_technique_of_ones_own_has_a_process_of_its_own(tmp_path: Path) -> None:
    """It may do anything, even where it is called like one of Saturn's."""
    folder = tmp_path / "techniques"
    folder.mkdir()
    shutil.copy(ROOT / "techniques" / "single.py", folder)
    run = runs.start(spec_for(tmp_path, small_job("slow", batches=5000), technique_folders=(str(folder),)))
    until(run, "step", 3)
    assert len(family(run)) == 4, "supervisor, technique, rank, the process above"
    run.kill()


def test_nothing_survives_its_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    run = runs.start(spec_for(tmp_path, small_job("with_helper", batches=5000), "ddp", devices=2))
    until(run, "step", 3)
    processes = family(run)
    helpers = [process for process in processes if process.name() == "sleep"]
    # One more each where the loss was looked at before training: globals are then as they were before.
    assert len(helpers) >= 2, "a process that each rank started"
    lock = str(tmp_path / "leases" / "devices" / "local-cpu0")
    holders = [process for process in processes if lock in open_files(process)]
    assert len(holders) == 3, "supervisor and two ranks hold the device, or it were free too early"
    processes[0].kill()
    end = run.wait()
    assert end["status"] == "lost"
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive
    assert leases.holders(tmp_path / "leases") == {}
    assert not list(tmp_path.glob("saturn-*")), "files for as long as it ran"


def test_a_run_goes_on_without_its_starter_and_is_found_again(tmp_path: Path) -> None:
    starter = textwrap.dedent(f"""
        import sys
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from running import small_job, spec_for
        from saturn_airflow.training import runs
        runs.start(spec_for(Path({str(tmp_path)!r}), small_job("slow", batches=150), outlive_seconds=60))
        """)
    subprocess.run([sys.executable, "-c", starter], check=True, cwd=ROOT)
    run = runs.attach(tmp_path / "state")
    assert run is not None
    events = list(run.events(poll=0.02))
    assert events[-1]["status"] == "finished"
    assert list(losses(events)) == list(range(1, 151))
    assert runs.attach(tmp_path / "state") is None


def test_a_run_nobody_comes_back_to_saves_and_ends(tmp_path: Path) -> None:
    starter = textwrap.dedent(f"""
        import sys
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from running import small_job, spec_for
        from saturn_airflow.training import runs
        runs.start(spec_for(Path({str(tmp_path)!r}), small_job("slow", batches=5000), outlive_seconds=4))
        """)
    subprocess.run([sys.executable, "-c", starter], check=True, cwd=ROOT)
    folder = tmp_path / "state" / "runs" / "0001"
    deadline = time.monotonic() + 60
    while Run(folder).is_alive() and time.monotonic() < deadline:
        time.sleep(0.1)
    end = Run(folder).wait()
    assert end["status"] == "stopped"
    assert end["result"]["checkpoint"]


def test_devices_in_use_are_waited_for_by_name(tmp_path: Path) -> None:
    first = runs.start(
        spec_for(
            tmp_path / "a",
            small_job("slow", batches=5000),
            leases_folder=str(tmp_path),
            device_ids=(0,),
            holder="sweep one: job a",
        )
    )
    until(first, "step")
    second = runs.start(
        spec_for(
            tmp_path / "b",
            small_job(),
            "ddp",
            devices=2,
            leases_folder=str(tmp_path),
            holder="sweep two: job b",
        )
    )
    (waiting,) = until(second, "waiting")
    assert waiting["for"] == ["sweep one: job a"]
    assert [holder.who for holder in leases.holders(tmp_path).values()] == ["sweep one: job a"]
    first.stop()
    assert second.wait()["status"] == "finished"


def test_one_job_is_never_trained_twice_at_once(tmp_path: Path) -> None:
    spec = spec_for(tmp_path, small_job("slow", batches=5000))
    first = runs.start(spec)
    until(first, "step")
    second = runs.start(spec)
    (waiting,) = until(second, "waiting")
    assert waiting["for"] == ["an earlier run of the same job"]
    first.stop()
    until(second, "start")
    second.stop(timeout=20)
    assert second.wait()["status"] == "stopped"


def test_a_run_that_waits_can_be_stopped(tmp_path: Path) -> None:
    with leases.acquire(["local-cpu0"], "somebody", folder=tmp_path / "leases"):
        run = runs.start(spec_for(tmp_path, small_job(), device_ids=(0,)))
        until(run, "waiting")
        run.stop()
        end = run.wait()
    assert (end["status"], end["reason"]) == ("stopped", "stopped while waiting for its devices")
    assert leases.waiters(tmp_path / "leases") == []


def test_who_waits_is_small(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"device_ids": (0,), "leases_folder": str(tmp_path / "leases")}
    with leases.acquire(["local-cpu0"], "somebody", folder=tmp_path / "leases"):
        run = runs.start(spec_for(tmp_path / "next", small_job(), priority=(1, 0), **settings))
        until(run, "waiting")
        supervisor, above = family(run)
        # What it shares with the server that it was forked from is there once.
        assert supervisor.memory_full_info().uss < 30 << 20
        assert above.memory_full_info().uss < 10 << 20
        above.kill()  # the run can do without it
        above.wait()
    assert run.wait()["status"] == "finished"


def test_a_technique_that_does_not_listen_is_ended(tmp_path: Path) -> None:
    run = runs.start(spec_for(tmp_path, small_job(), "deaf", stop_seconds=1))
    until(run, "deaf")
    run.stop()
    end = run.wait()
    assert end["status"] == "stopped"
    assert end["reason"].startswith("did not stop in time when asked to, and was ended")


def test_a_folder_that_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "state").touch()
    with pytest.raises(
        InvalidSweepError, match=r"job 'small-squared' can't be run in .*state: Not a directory"
    ):
        runs.start(spec_for(tmp_path, small_job()))


def test_events_survive_a_full_disk(tmp_path: Path) -> None:
    """The events' file is a pipe that is full for a while: nothing is lost, and nothing torn."""
    (tmp_path / "spec.json").write_text(json.dumps(spec_for(tmp_path, small_job()).to_dict()))
    reader, writer = os.pipe2(os.O_NONBLOCK)
    supervisor = Supervisor(tmp_path, os.getpid())
    os.dup2(writer, supervisor._events)
    for number in range(3000):
        supervisor.emit({"event": "step", "step": number, "text": "x" * 50})
    read = b""
    while supervisor._unwritten:
        read += os.read(reader, 1 << 20)
        supervisor.emit({"event": "more"})
    read += os.read(reader, 1 << 20)
    events = [json.loads(line) for line in read.splitlines()]
    assert [e["step"] for e in events if e["event"] == "step"] == list(range(3000))


def test_killing_the_whole_group_leaves_nothing(tmp_path: Path) -> None:
    run = runs.start(spec_for(tmp_path, small_job("slow", batches=5000), "ddp", devices=2))
    until(run, "step", 2)
    processes = family(run)
    os.killpg(processes[0].pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive
    assert run.wait()["status"] == "lost"
