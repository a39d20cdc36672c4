"""Leases: never two holders, never half a hold, nobody starved, and nothing kept by the dead."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from saturn_airflow.launch import leases
from saturn_airflow.launch.kept_lease import KeptLease
from saturn_airflow.launch.leases import GivenUpError, Waiter
from saturn_airflow.model.errors import InvalidSweepError

ROOT = Path(__file__).parent.parent.parent
DEVICES = ["a", "b", "c", "d"]


def test_all_or_none(tmp_path: Path) -> None:
    with leases.acquire(["a"], "first", folder=tmp_path), pytest.raises(GivenUpError):
        leases.acquire(["a", "b"], "second", folder=tmp_path, give_up=lambda: True)
    assert leases.holders(tmp_path) == {}
    with leases.acquire(["a", "b"], "second", folder=tmp_path) as lease:
        assert lease.devices == ("a", "b")
        assert [holder.who for holder in leases.holders(tmp_path).values()] == ["second", "second"]


def test_any_that_are_free(tmp_path: Path) -> None:
    with leases.acquire(["b"], "first", folder=tmp_path):
        with leases.acquire(DEVICES, "second", count=2, folder=tmp_path) as lease:
            assert lease.devices == ("a", "c")
        with pytest.raises(GivenUpError):
            leases.acquire(DEVICES, "third", count=4, folder=tmp_path, give_up=lambda: True)


def test_who_holds_what_since_when(tmp_path: Path) -> None:
    before = time.time()
    with leases.acquire(["a"], "sweep: job gpt2", folder=tmp_path):
        (holder,) = leases.holders(tmp_path).values()
        assert (holder.who, holder.pid) == ("sweep: job gpt2", os.getpid())
        assert before <= holder.since <= time.time()
        with contextlib.closing(Waiter(["a"], "next", folder=tmp_path)) as waiter:
            assert waiter.take() is None
            assert waiter.blockers == ["sweep: job gpt2"]
            assert [waiting.who for waiting in leases.waiters(tmp_path)] == ["next"]
        assert leases.waiters(tmp_path) == []


@pytest.mark.parametrize("count", [0, 3])
def test_more_than_there_are(count: int, tmp_path: Path) -> None:
    with pytest.raises(InvalidSweepError, match=f"job x asks for {count} devices; there are 2: a, b"):
        leases.acquire(["a", "b"], "job x", count=count, folder=tmp_path)


def test_a_folder_that_can_not_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidSweepError, match="SATURN_LEASES_FOLDER"):
        leases.acquire(["a"], "job x", folder=tmp_path / "file")


@pytest.mark.parametrize("how", ["removed", "restored", "devices", "tickets"])
def test_who_removes_or_replaces_the_folder_gives_no_device_to_two(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a cleaner of temporary files does, or who puts back a copy."""
    folder = tmp_path / "leases"
    lease = leases.acquire(["d0"], "runs", folder=folder)
    kept = KeptLease(lease, folder)
    early = Waiter(["d0"], "early", priority=(2.0, 0), folder=folder)
    assert early.take() is None
    for _ in range(2):
        if how == "removed":
            shutil.rmtree(folder)
        elif how == "restored":
            shutil.copytree(folder, tmp_path / "copy")
            shutil.rmtree(folder)
            (tmp_path / "copy").rename(folder)
        else:
            shutil.rmtree(folder / how)
        assert early.take() is None, "who holds it has not looked yet"
        assert kept.lost(at_once=True) == ""
        late = Waiter(["d0"], "late", priority=(3.0, 0), folder=folder)
        assert late.take() is None
        assert early.take() is None
        assert [waiter.who for waiter in leases.waiters(folder)] == ["early", "late"]
        assert leases.holders(folder)["d0"].who == "runs"
        late.close()
    lease.release()
    late = Waiter(["d0"], "late", priority=(3.0, 0), folder=folder)
    monkeypatch.setattr(early, "_takes_from", 0.0)
    assert late.take() is None, "who came first goes first"
    with contextlib.closing(late), early.take() or pytest.fail("it is free"):
        assert late.take() is None


def test_who_finds_another_on_its_devices_is_told_who_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "leases"
    with leases.acquire(["a", "b"], "runs", folder=folder) as lease:
        kept = KeptLease(lease, folder)
        shutil.rmtree(folder)
        with leases.acquire(["b"], "came", folder=folder):
            assert kept.lost() == "", "it looks now and again"
            told = kept.lost(at_once=True)
            assert told == f"somebody has replaced the folder of leases {folder}: came holds b, too"
            assert [one.who for one in leases.holders(folder).values()] == ["runs", "came"]
        assert kept.lost(at_once=True) == ""
        assert {one.who for one in leases.holders(folder).values()} == {"runs"}
    assert leases.holders(folder) == {}


def test_a_wide_job_is_not_starved(tmp_path: Path) -> None:
    holding = leases.acquire(["a"], "running", folder=tmp_path)
    wide = Waiter(["a", "b"], "wide", priority=(1, 0), folder=tmp_path)
    assert wide.take() is None
    narrow = Waiter(["b"], "narrow", priority=(1, 1), folder=tmp_path)
    assert narrow.take() is None, "b is free, but the wide job is first"
    assert narrow.blockers == ["wide"]
    early = Waiter(["b"], "early", priority=(0, 9), folder=tmp_path)
    lease = early.take()
    assert lease is not None, "an older plan goes first"
    lease.release()
    holding.release()
    lease = wide.take()
    assert lease is not None
    assert narrow.take() is None
    lease.release()
    lease = narrow.take()
    assert lease is not None
    lease.release()


def test_one_who_wants_any_keeps_no_more_than_it_needs(tmp_path: Path) -> None:
    with leases.acquire(["a", "b"], "running", folder=tmp_path):
        three = Waiter(DEVICES, "three", count=3, priority=(1, 0), folder=tmp_path)
        assert three.take() is None
        one = Waiter(["d"], "one", priority=(1, 1), folder=tmp_path)
        assert one.take() is None, "three keeps c and d until one more is free"
        three.close()
        lease = one.take()
        assert lease is not None
        lease.release()


@pytest.mark.slow
def test_waiters_are_served_in_the_plans_order(tmp_path: Path) -> None:
    served: list[int] = []

    def work(place: int) -> None:
        with leases.acquire(["a"], f"job {place}", priority=(1.0, place), folder=tmp_path):
            served.append(place)

    threads = [threading.Thread(target=work, args=(place,)) for place in (2, 0, 3, 1)]
    with leases.acquire(["a"], "running", folder=tmp_path):
        for thread in threads:
            thread.start()
        while len(leases.waiters(tmp_path)) < 4:
            time.sleep(0.01)
    for thread in threads:
        thread.join()
    assert served == [0, 1, 2, 3]


@contextlib.contextmanager
def other_process(folder: Path, device: str, then: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that takes a device, says so, and goes on."""
    code = (
        "import subprocess, time; from pathlib import Path; from saturn_airflow.training import leases;"
        f"lease = leases.acquire([{device!r}], 'other', folder=Path({str(folder)!r}),"
        "on_wait=lambda holders: print('waiting', flush=True)); print('held', flush=True);" + then
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_the_dead_hold_nothing(tmp_path: Path) -> None:
    with other_process(tmp_path, "a", "time.sleep(100)") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        assert leases.holders(tmp_path)["a"].pid == process.pid
        process.kill()
        process.wait()
        leases.acquire(["a"], "next", folder=tmp_path).release()


def test_the_dead_do_not_wait(tmp_path: Path) -> None:
    with leases.acquire(["a"], "running", folder=tmp_path), other_process(tmp_path, "a", "") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.kill()
        process.wait()
        assert leases.waiters(tmp_path) == []
        assert list((tmp_path / "tickets").iterdir()) == []


def test_who_inherits_a_lease_holds_it(tmp_path: Path) -> None:
    then = "subprocess.Popen(['sleep', '100'], pass_fds=lease.files).pid; print(p, flush=True)"
    then = then.replace("subprocess", "p = subprocess", 1)
    with other_process(tmp_path, "a", then) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        child = int(process.stdout.readline())
        process.wait()
        assert "a" in leases.holders(tmp_path), "its launcher is gone, but it may still use the device"
        os.kill(child, signal.SIGKILL)
        leases.acquire(["a"], "next", folder=tmp_path).release()


@pytest.mark.slow
def test_many_processes_and_some_killed_never_share_a_device(tmp_path: Path) -> None:
    """Twelve processes take random sets of five devices; thirty of them are killed at random moments."""
    rng = random.Random(5)
    running: dict[int, subprocess.Popen[bytes]] = {}
    killed_at: dict[int, int] = {}
    seeds = iter(range(1000))

    def start(turns: int) -> None:
        command = [sys.executable, Path(__file__).parent / "lease_worker.py"]
        process = subprocess.Popen([*command, str(tmp_path), str(next(seeds)), "5", str(turns)], cwd=ROOT)  # type: ignore[list-item]
        running[process.pid] = process

    for _ in range(11):
        start(1_000_000)
    for _ in range(30):
        time.sleep(rng.uniform(0, 0.1))
        victim = rng.choice(list(running))
        assert running[victim].poll() is None, "no worker may fail"
        killed_at[victim] = time.monotonic_ns()
        running[victim].kill()
        running.pop(victim).wait()
        start(1_000_000)
    # Nobody is starved: whoever asks beside them gets its turns.
    start(5)
    *_, patient = running.values()
    assert patient.wait(60) == 0
    for pid, process in running.items():
        if process is not patient:
            assert process.poll() is None, "no worker may fail"
            killed_at[pid] = time.monotonic_ns()
            process.kill()
            process.wait()

    holds: dict[str, list[tuple[int, int, int]]] = {}
    for path in tmp_path.glob("log-*"):
        pid = int(path.name.removeprefix("log-"))
        lines = [line.split() for line in path.read_text().splitlines()]
        for number, (what, at, *names) in enumerate(lines):
            if what == "take":
                end = int(lines[number + 1][1]) if number + 1 < len(lines) else killed_at[pid]
                for name in names:
                    holds.setdefault(name, []).append((int(at), end, pid))
    assert sum(map(len, holds.values())) > 200
    assert len(holds) == 5
    for device, spans in holds.items():
        spans.sort()
        for (_, end, one), (start_of_next, _, other) in itertools.pairwise(spans):
            assert end <= start_of_next, f"{device} was held by {one} and {other} at once"
    assert leases.holders(tmp_path / "leases") == {}


class Line(RuleBasedStateMachine):
    """Waiters come, look, take, leave and give back in any order."""

    def __init__(self) -> None:
        super().__init__()
        self._scratch = tempfile.TemporaryDirectory()
        self.folder = Path(self._scratch.name)
        self.waiting: list[Waiter] = []
        self.holding: list[leases.Lease] = []

    def held(self) -> list[str]:
        return [device for lease in self.holding for device in lease.devices]

    @rule(wanted=st.sets(st.sampled_from(DEVICES), min_size=1), data=st.data(), place=st.integers(0, 3))
    def join(self, wanted: set[str], data: st.DataObject, place: int) -> None:
        count = data.draw(st.none() | st.integers(1, len(wanted)))
        who = f"waiter {len(self.waiting)}"
        self.waiting.append(
            Waiter(sorted(wanted), who, count=count, priority=(0.0, place), folder=self.folder)
        )

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def look(self, data: st.DataObject) -> None:
        waiter = data.draw(st.sampled_from(self.waiting))
        line = sorted(self.waiting, key=lambda other: other._ticket.order)
        before = line[: line.index(waiter)]
        free = [device for device in waiter.wanted if device not in self.held()]
        lease = waiter.take()
        if lease is None:
            assert before or len(free) < waiter.need, "the first in line takes what is free"
            assert waiter.ahead == sum(bool(set(other.wanted) & set(waiter.wanted)) for other in before)
            return
        self.waiting.remove(waiter)
        assert len(lease.devices) == waiter.need
        assert set(lease.devices) <= set(free)
        for other in before:
            if other.need == len(other.wanted):
                assert set(lease.devices).isdisjoint(other.wanted), "an earlier waiter wants it"
        self.holding.append(lease)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        waiter = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(waiter)
        waiter.close()

    @precondition(lambda self: self.holding)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.holding))
        self.holding.remove(lease)
        lease.release()

    @invariant()
    def nobody_shares(self) -> None:
        assert len(self.held()) == len(set(self.held()))
        assert sorted(leases.holders(self.folder)) == sorted(self.held())

    def teardown(self) -> None:
        """Once all is given back, everyone is served."""
        for lease in self.holding:
            lease.release()
        while self.waiting:
            taken = [(waiter, lease) for waiter in self.waiting if (lease := waiter.take()) is not None]  # type: ignore[assignment]
            assert taken, "a deadlock"
            for waiter, lease in taken:
                self.waiting.remove(waiter)
                lease.release()
        self._scratch.cleanup()
        super().teardown()


TestLine = pytest.mark.slow(Line.TestCase)
TestLine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
