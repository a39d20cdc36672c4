"""One job must not take its node down: what a run may use of its machine's memory."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import small_job, spec_for

from saturn_airflow.launch import host_memory, runs
from saturn_airflow.launch.host_memory import Watch
from saturn_airflow.model import sizes
from saturn_airflow.model.errors import InvalidSweepError

MB, GB = 10**6, 10**9

FAMILY = """
import os, sys
held = bytearray(os.urandom(1 << 20) * int(sys.argv[1]))
children = []
ready, say = os.pipe()
for _ in range(int(sys.argv[2])):
    if not (pid := os.fork()):
        own = bytearray(os.urandom(1 << 20) * int(sys.argv[3]))
        os.write(say, b"x")
        sys.stdin.read()
        os._exit(0)
    os.read(ready, 1)
    children.append(pid)
print(os.getpid(), *children, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def family() -> Iterator[object]:
    """Starts a process that holds some MiB and forks helpers that hold others; their ids."""
    started: list[subprocess.Popen[str]] = []

    def start(mib: int, helpers: int, each: int) -> list[int]:
        command = [sys.executable, "-c", FAMILY, *map(str, (mib, helpers, each))]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process = subprocess.Popen(command, text=True, **pipes)  # type: ignore[call-overload]
        started.append(process)
        return [int(pid) for pid in process.stdout.readline().split()]

    yield start
    for process in started:
        process.communicate()


def machine(monkeypatch: pytest.MonkeyPatch, total: float, left: float) -> None:
    monkeypatch.setattr(host_memory, "total", lambda: total)
    monkeypatch.setattr(host_memory, "available", lambda: left)


@pytest.mark.slow
def test_pages_that_processes_share_count_once(family: object) -> None:
    pids = family(200, helpers=4, each=1)  # type: ignore[operator]
    assert Watch(lambda: pids, "500 MB", 1.0).look() is None
    assert "may have 150.0 MB" in str(Watch(lambda: pids, "150 MB", 1.0).look())


@pytest.mark.slow
def test_what_helpers_hold_counts(family: object) -> None:
    pids = family(1, helpers=3, each=100)  # type: ignore[operator]
    assert Watch(lambda: pids[:2], "250 MB", 1.0).look() is None
    assert "may have 250.0 MB" in str(Watch(lambda: pids, "250 MB", 1.0).look())


def test_no_limit_is_no_limit_and_who_has_ended_uses_nothing(family: object) -> None:
    assert Watch(lambda: [os.getpid()], "0", 1.0).look() is None
    assert Watch(lambda: [2**22 + 1], "1 kB", 1.0).look() is None


@pytest.mark.slow
def test_where_the_machine_is_full_who_is_beyond_its_share_ends(
    family: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = family(400, helpers=0, each=0)  # type: ignore[operator]
    machine(monkeypatch, total=2 * GB, left=0.05 * GB)
    modest, greedy = Watch(lambda: pids, "0.9", 0.5), Watch(lambda: pids, "0.9", 0.05)
    assert modest.look() is None
    assert "100.0 MB that are its devices' part" in str(greedy.look())
    assert greedy.crowded
    machine(monkeypatch, total=2 * GB, left=0.5 * GB)
    assert Watch(lambda: pids, "0.9", 0.05).look() is None, "nobody else wants the memory"


@pytest.mark.slow
def test_of_two_beyond_their_shares_the_greedier_ends_first(
    family: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = family(400, helpers=0, each=0)  # type: ignore[operator]
    machine(monkeypatch, total=2 * GB, left=0.1 * GB)
    assert Watch(lambda: pids, "0.9", 0.15).look() is None
    assert Watch(lambda: pids, "0.9", 0.05).look() is not None


def test_the_limits_of_a_container_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    for folder, most in ((tmp_path, "max"), (tmp_path / "a", str(4 * GB))):
        (folder / "memory.max").write_text(most)
        (folder / "memory.current").write_text(str(3 * GB))
        (folder / "memory.stat").write_text(f"anon 7\ninactive_file {GB}\n")
    real = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda path: "0::/a\n" if path == Path("/proc/self/cgroup") else real(path)
    )
    assert list(host_memory._groups(tmp_path)) == [(tmp_path / "a", 4 * GB, 2 * GB)]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_job_that_takes_too_much_fails_and_its_sibling_trains_on(tmp_path: Path, workers: int) -> None:
    job = dataclasses.replace(
        small_job(batches=120), load_dataloader="small_jobs:hoarded", data_args={"workers": workers}
    )
    greedy = spec_for(tmp_path, job, "single", device_ids=(0,), host_memory="1 GB")
    other = small_job("slow", batches=40)
    sibling = spec_for(tmp_path / "sibling", other, device_ids=(1,), leases_folder=greedy.leases_folder)
    beside = runs.start(sibling)
    run = runs.start(greedy)
    *events, end = run.events(poll=0.02)
    assert (end["status"], end["traceback"]) == ("out_of_memory", "")
    assert "may have 1.0 GB ([saturn] job_memory is 1 GB)" in end["reason"]
    assert "restarting" not in [event["event"] for event in events], "it would meet the same end"
    assert beside.wait()["status"] == "finished"


@pytest.mark.parametrize(
    ("text", "expected"), [("64 GB", 64 * GB), ("1.5GiB", 1.5 * 2**30), ("0.5", 4 * GB), ("0", 0)]
)
def test_amounts(text: str, expected: float) -> None:
    assert sizes.bytes_of(text, "it", whole=8 * GB) == expected


@pytest.mark.parametrize("text", ["", "much", "-1 GB", "1 XB", "GB", "90%"])
def test_what_is_no_amount_is_refused(text: str) -> None:
    with pytest.raises(InvalidSweepError, match=r"\[saturn\] job_memory is .*give an amount"):
        sizes.bytes_of(text, host_memory.SETTING, whole=1.0)


def test_a_share_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidSweepError, match="not a part"):
        sizes.bytes_of("0.9", "the budget")
