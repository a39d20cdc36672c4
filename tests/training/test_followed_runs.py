"""Runs that one process follows after another, and how they end."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from running import small_job, spec_for
from test_supervisor import ROOT, finish, until

from saturn_airflow.launch import followers, past_runs, runs
from saturn_airflow.launch.runs import Run
from saturn_airflow.launch.supervisor import Supervisor

pytestmark = pytest.mark.ranks


def start_elsewhere(tmp_path: Path, **settings: Any) -> Run:
    """A run that was started by a process which is gone."""
    starter = textwrap.dedent(f"""
        import sys
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from running import small_job, spec_for
        from saturn_airflow.training import runs
        runs.start(spec_for(Path({str(tmp_path)!r}), small_job("slow", batches=150), **{settings!r}))
        """)
    subprocess.run([sys.executable, "-c", starter], check=True, cwd=ROOT)
    run = runs.attach(tmp_path / "state")
    assert run is not None
    return run


def test_who_follows_next_reads_on_where_the_last_one_stopped(tmp_path: Path) -> None:
    first = start_elsewhere(tmp_path, outlive_seconds=60)
    seen = until(first, "step", 20)
    second = Run(first.folder)
    second.read_on()
    more = list(second.events(poll=0.02))
    # The last event that was handed out may not have been dealt with: it comes again, and no other does.
    assert more[0] == seen[-1]
    assert [e["step"] for e in [*seen, *more[1:]] if e["event"] == "step"] == list(range(1, 151))
    assert second.end == more[-1]
    third = Run(first.folder)
    third.read_on()
    assert [e["event"] for e in third.events()] == ["end"], "nobody has said that the end was dealt with"
    third.done_with()
    third.read_on()
    assert list(third.events()) == []
    assert third.end == more[-1]


def test_who_must_go_stops_following_and_the_run_goes_on(tmp_path: Path) -> None:
    run = start_elsewhere(tmp_path, outlive_seconds=60)
    until(run, "step", 2)
    assert all(event["event"] != "end" for event in run.events(poll=0.02, give_up=lambda: True))
    assert run.is_alive()
    assert run.end is None
    run.stop()


def test_a_run_is_stopped_through_its_folder_from_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start_elsewhere(tmp_path, outlive_seconds=60)
    until(run, "step", 2)
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    monkeypatch.setattr(
        "os.kill", lambda *_: pytest.fail("a process of the same number may be anyone's here")
    )
    monkeypatch.setattr(
        "os.killpg", lambda *_: pytest.fail("a process of the same number may be anyone's here")
    )
    run.stop()
    assert run.wait()["status"] == "stopped"
    assert run.end is not None
    assert run.end["result"]["checkpoint"]


def test_one_at_a_time_follows_a_job(tmp_path: Path) -> None:
    waited: list[bool] = []
    with followers.sole_follower(tmp_path / "state") as alone:
        assert alone
        with followers.sole_follower(
            tmp_path / "state", give_up=lambda: len(waited) > 0, on_wait=lambda: waited.append(True)
        ) as second:
            assert not second
    with followers.sole_follower(tmp_path / "state") as alone:
        assert alone


@contextlib.contextmanager
def a_follower(folder: Path) -> Iterator[tuple[psutil.Process, psutil.Process]]:
    """A process that follows the job in ``folder``, and the one above it."""
    script = f"""
        import os, time
        from saturn_airflow.launch import followers
        if os.fork():
            os.wait()
        else:
            with followers.sole_follower({str(folder)!r}):
                open({str(folder / "follows")!r}, "w").write(str(os.getpid()))
                time.sleep(600)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT) as above:
        while not (told := folder / "follows").exists() or not told.read_text():
            assert above.poll() is None
            time.sleep(0.05)
        try:
            yield psutil.Process(int(told.read_text())), psutil.Process(above.pid)
        finally:
            above.kill()


@pytest.mark.parametrize("which", [0, 1], ids=["itself", "the process above it"])
def test_a_follower_that_a_signal_holds_up_is_not_waited_for(
    which: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followers, "_FOLLOWER_SECONDS", 2.0)
    with a_follower(tmp_path) as processes:
        begin = time.monotonic()
        with followers.sole_follower(tmp_path, lambda: time.monotonic() > begin + 4) as alone:
            assert not alone, "who follows and is not held up is waited for"
        processes[which].suspend()
        begin = time.monotonic()
        with followers.sole_follower(tmp_path, lambda: time.monotonic() > begin + 60) as alone:
            assert alone


def test_a_follower_whom_airflow_does_not_answer_any_more_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followers, "_LET_GO_SECONDS", 2.0)
    with a_follower(tmp_path) as (follower, above):
        begin = time.monotonic()
        with followers.sole_follower(tmp_path, lambda: time.monotonic() > begin + 60) as alone:
            assert alone
            assert time.monotonic() > begin + 2
        assert not follower.is_running() or follower.status() == psutil.STATUS_ZOMBIE
        above.wait()


def test_a_task_that_a_signal_holds_up_is_ended_so_that_the_next_try_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saturn_airflow.launch.supervisor._FOLLOWER_SECONDS", 2.0)
    run = runs.start(spec_for(tmp_path, small_job(), outlive_seconds=600.0))
    run.wait()
    supervisor = Supervisor(run.folder, None)
    with a_follower(tmp_path / "state") as (follower, _):
        begin = time.monotonic()
        while time.monotonic() < begin + 4:
            supervisor._poll()
            time.sleep(0.1)
        assert followers.follower(tmp_path / "state") == follower.pid
        follower.suspend()
        begin = time.monotonic()
        while followers.follower(tmp_path / "state") is not None:
            supervisor._poll()
            assert time.monotonic() < begin + 60
            time.sleep(0.1)
    assert "held up" in run.so_far()[-1]["message"]


def test_runs_that_ended_badly_are_counted_by_try(tmp_path: Path) -> None:
    for try_number in (1, 2):
        finish(spec_for(tmp_path, small_job("broken_loss"), try_number=try_number))
    stopped = runs.start(spec_for(tmp_path, small_job("slow", batches=5000), try_number=3))
    until(stopped, "step")
    stopped.stop()
    goes_on_from = stopped.spec.definition["hash"]
    finish(spec_for(tmp_path, small_job(), try_number=4, goes_on_from=goes_on_from))
    state = tmp_path / "state"
    assert [past_runs.failures(state, _after(number)) for number in (0, 1, 2)] == [2, 1, 0]
    assert len(runs.all_of(tmp_path / "state")) == 4


def test_time_on_devices_that_is_up_ends_a_run_with_a_checkpoint(tmp_path: Path) -> None:
    spec = spec_for(tmp_path, small_job("slow", batches=50_000), most_seconds=1.0, stop_seconds=60.0)
    _, end, events = finish(spec)
    assert end["status"] == "timed_out"
    assert events[-2]["event"] == "checkpoint"
    assert events[-2]["step"] == end["result"]["steps"] > 0
    assert end["reason"] == "it had its devices for as long as it may (job_timeout); it was saved"


def _after(number: int) -> Callable[[Run], bool]:
    return lambda run: run.spec.try_number > number


@pytest.mark.parametrize("jump", [3600.0, -86400.0])
def test_a_clock_that_jumps_costs_a_job_no_time_on_devices(tmp_path: Path, jump: float) -> None:
    spec = spec_for(tmp_path, small_job("slow", batches=20), checkpoint_seconds=0.1)
    _, _, events = finish(spec)
    before, saved = past_runs.time_on_devices(spec.folder), past_runs.last_checkpoint(spec.folder)
    assert 0.4 < before["actual_seconds"] <= events[-1]["clock"] - events[0]["clock"] + 0.001
    (path,) = Path(spec.folder).glob("runs/*/events.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert sum(event["event"] == "checkpoint" for event in lines) > 1
    for event in lines[len(lines) // 2 :]:
        event["time"] += jump
    path.write_text("".join(json.dumps(event) + "\n" for event in lines))
    held = past_runs.time_on_devices(spec.folder)
    assert held["actual_seconds"] == before["actual_seconds"]
    assert held["ended_at"] - held["started_at"] == pytest.approx(before["ended_at"] - before["started_at"])
    last = past_runs.last_checkpoint(spec.folder)
    assert last is not None
    assert saved is not None
    assert last["step"] == saved["step"]


def test_a_clock_that_is_set_back_between_two_runs_has_none_end_before_it_began(tmp_path: Path) -> None:
    spec = spec_for(tmp_path, small_job("slow", batches=20))
    finish(spec)
    finish(dataclasses.replace(spec, job=small_job("slow", batches=40)))
    first, _ = sorted(Path(spec.folder).glob("runs/*/events.jsonl"))
    lines = [json.loads(line) for line in first.read_text().splitlines()]
    first.write_text("".join(json.dumps({**event, "time": event["time"] + 3600}) + "\n" for event in lines))
    held = past_runs.time_on_devices(spec.folder)
    assert held["ended_at"] < time.time() + 60
    assert held["ended_at"] - held["started_at"] >= held["actual_seconds"] - 0.001
