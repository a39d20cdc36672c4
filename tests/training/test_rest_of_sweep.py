"""What the rest of a sweep needs, told anew while one of its jobs waits among those of other sweeps."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from running import small_job, spec_for

from saturn_airflow.launch import ledger, read_apart, rest_of_sweep
from saturn_airflow.launch.file_locks import is_locked
from saturn_airflow.launch.giving_way import GivingWay, TurnsOfRun
from saturn_airflow.launch.leases import Waiter
from saturn_airflow.launch.ledger import Ledger
from saturn_airflow.launch.read_apart import ReaderApart
from saturn_airflow.launch.rest_of_sweep import RestOfSweep
from saturn_airflow.launch.turn_at_node import Sharing
from saturn_airflow.model.active_sweep import ActiveSweep
from saturn_airflow.model.claims import Claim, claim_of
from saturn_airflow.model.cluster import Node
from saturn_airflow.model.folders import OF_SWEEPS, slug
from saturn_airflow.model.problem import Option, PlannedJob
from saturn_airflow.model.sharing import SharedJob, SharedSweep, SharingRules

DEVICES = ("d0",)
SINGLE = {("single", 1): (100.0, 2.0)}
RULES = SharingRules(checkpoint=1.0, quiet=0.0)


@pytest.fixture(autouse=True)
def read_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rest_of_sweep, "_READ_SECONDS", 0.0)


def write(home: Path, sweep: str, jobs: dict[str, str], trials: bool = False) -> None:
    """Note in the ledger a sweep of jobs of 100 s, each with its node."""
    options = (Option("single", 1, {"cpu": 100.0}, 2.0), Option("ddp", 2, {"cpu": 80.0}, 2.0))
    planned = tuple(SharedJob(PlannedJob(job, options, (node,))) for job, node in jobs.items())
    facts = SharedSweep(sweep, planned, arrived=0.0, alone=1e9, trials=trials)
    nodes = Node("here", 1, "cpu"), Node("there", 2, "cpu")
    Ledger(home).write(
        ActiveSweep(dag_id=sweep, run_id="run", folder=f"sweeps/{sweep}", made=1.0, nodes=nodes, sweep=facts)
    )


def has_trained(home: Path, sweep: str, job: str, share: float) -> None:
    folder = home / "sweeps" / sweep / slug(job, OF_SWEEPS) / "runs" / "1"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "alive").touch()
    (folder / "spec.json").write_text(json.dumps(spec_for(home, small_job()).to_dict()))
    events = (
        {"event": "start", "step": 0, "total_batches": 100},
        {"event": "step", "step": int(100 * share), "epoch": 0, "loss": 1.0, "seconds": 0.1},
    )
    told = ({"event": "format", "format": 1}, *({**event, "time": 1.0} for event in events))
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in told))


def claim(sweep: str, job: str, **facts: float) -> Claim:
    shared = SharedSweep(sweep, (), arrived=0.0, alone=1e9, **facts)  # type: ignore[arg-type]
    return claim_of(shared, job, "single", SINGLE, made=1.0)


def waiter(home: Path, mine: Claim) -> Waiter:
    sharing = Sharing(mine, DEVICES, RULES, RestOfSweep(str(home), mine.sweep.name))
    return Waiter(DEVICES, mine.job.name, None, (mine.made, 0), home / "leases", sharing)


def test_who_is_nearly_done_elsewhere_goes_first_by_then(tmp_path: Path) -> None:
    """The plan said 300 device-seconds of the first ones at the other node; they have trained since."""
    write(tmp_path, "a", {"last": "here", "b1": "there", "b2": "there", "b3": "there"})
    write(tmp_path, "b", {"first": "here", "c1": "there"})
    many = waiter(tmp_path, claim("a", "last", elsewhere=300.0))
    few = waiter(tmp_path, claim("b", "first", elsewhere=100.0))
    with contextlib.closing(many), contextlib.closing(few):
        for _ in range(2):
            assert many.take() is None, "the other sweep has less left"
        for job in ("b1", "b2", "b3"):
            has_trained(tmp_path, "a", job, 0.9)
        lease = many.take()
        assert lease is not None
        assert lease.holder.claim is not None
        assert lease.holder.claim.sweep.elsewhere == pytest.approx(3 * (2 + 0.1 * 98))
        lease.release()
        lease = few.take()
        assert lease is not None
        lease.release()


def test_jobs_that_no_task_has_asked_for_yet_count(tmp_path: Path) -> None:
    """Tasks wait in a pool of Airflow's: of a sweep of ten jobs a node may see one."""
    write(tmp_path, "a", {f"job-{number}": "here" for number in range(10)})
    write(tmp_path, "b", {"one": "here", "two": "here"})
    many, few = waiter(tmp_path, claim("a", "job-0")), waiter(tmp_path, claim("b", "one"))
    with contextlib.closing(many), contextlib.closing(few):
        for _ in range(2):
            assert many.take() is None
        lease = [few.take() for _ in range(2)][-1]
        assert lease is not None
        with contextlib.closing(waiter(tmp_path, claim("b", "two"))) as second:
            second.take()
            second.take()
            told = second._ticket.holder.claim
            assert told is not None
            assert told.sweep.elsewhere == 0.0, "both of its jobs are here"
        lease.release()


def test_a_running_job_tells_it_too(tmp_path: Path) -> None:
    write(tmp_path, "a", {"runs": "here", "there": "there"})
    mine, folder = claim("a", "runs"), tmp_path / "leases"
    lease = waiter(tmp_path, mine).take()
    assert lease is not None
    with lease, contextlib.closing(waiter(tmp_path, claim("b", "waits"))) as other:
        other.take()
        stay = GivingWay(Sharing(mine, DEVICES, RULES, RestOfSweep(str(tmp_path), "a")), lease, folder)
        for expected in (0.0, 100.0):
            stay._looked_at -= 10
            stay.asked()
            assert lease.holder.claim is not None
            assert lease.holder.claim.sweep.elsewhere == expected


@pytest.mark.parametrize("waits", [None, "a"])
def test_a_running_job_looks_at_no_sibling_unless_another_sweep_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: str | None
) -> None:
    """A sibling's disk that does not answer would hold it up."""
    write(tmp_path, "a", {"runs": "here", "waits": "here", "there": "there"})
    mine, folder = claim("a", "runs"), tmp_path / "leases"
    lease = waiter(tmp_path, mine).take()
    assert lease is not None
    stay = GivingWay(Sharing(mine, DEVICES, RULES, RestOfSweep(str(tmp_path), "a")), lease, folder)
    with lease, contextlib.ExitStack() as waiting:
        with contextlib.closing(waiter(tmp_path, claim("b", "comes and goes"))) as other:
            other.take()
            stay._looked_at -= 10
            stay.asked()
        if waits is not None:
            waiting.enter_context(contextlib.closing(waiter(tmp_path, claim(waits, "waits")))).take()
        stay._looked_at -= 10
        stay.asked()
        monkeypatch.setattr(ReaderApart, "start", lambda _: pytest.fail("it reads what its siblings wrote"))
        for _ in range(3):
            stay._looked_at -= 10
            stay.asked()


def test_the_claim_stays_where_the_ledger_says_nothing(tmp_path: Path) -> None:
    mine = claim("a", "one", elsewhere=7.0)
    rest = RestOfSweep(str(tmp_path), "a")
    assert rest.put_in(mine) == mine, "nothing was seen of the node yet"
    rest.see([mine])
    assert rest.put_in(mine) == mine, "no such sweep"
    write(tmp_path, "a", {"one": "here"}, trials=True)
    assert rest.put_in(mine) == mine, "only its trials are listed"
    write(tmp_path, "a", {"one": "here", "two": "there"})
    assert rest.put_in(mine).sweep.elsewhere == 100.0
    (path,) = (tmp_path / "sweeps" / ".active").iterdir()
    path.write_text("[]")
    assert rest.put_in(mine) == mine


def test_a_ledger_that_is_slow_to_read_is_read_rarely_where_jobs_come_and_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a sweep of a thousand jobs each look takes a third of a second, and each waiter looks."""
    monkeypatch.setattr(rest_of_sweep, "_READ_SECONDS", 20.0)
    write(tmp_path, "a", {"one": "here", "two": "here", "three": "there"})
    mine, read = claim("a", "one"), tmp_path / "read"
    really = Ledger.cluster

    def slowly(self: Ledger, *arguments: object) -> object:
        with open(read, "a") as file:
            file.write("x")
        time.sleep(0.1)
        return really(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Ledger, "cluster", slowly)
    rest = RestOfSweep(str(tmp_path), "a")
    for _ in range(3):
        rest.see([mine])
        assert rest.put_in(mine).sweep.elsewhere == 200.0
        rest.see([mine, claim("a", "two")])
        assert rest.put_in(mine).sweep.elsewhere == 100.0, "what is here is known at once"
    assert read.read_text() == "x"
    rest._read_at -= 15.0
    rest.put_in(mine)
    assert read.read_text() == "xx"


def test_a_sibling_whose_disk_does_not_answer_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ledger, "_PATIENCE_SECONDS", 1.5)
    write(tmp_path, "a", {"runs": "here", "hangs": "there", "half": "there"})
    has_trained(tmp_path, "a", "hangs", 0.9)
    has_trained(tmp_path, "a", "half", 0.5)
    alive = tmp_path / "sweeps" / "a" / slug("hangs", OF_SWEEPS) / "runs" / "1" / "alive"
    alive.unlink()
    os.mkfifo(alive)  # whoever opens it waits for somebody who writes
    mine, folder = claim("a", "runs"), tmp_path / "leases"
    one = waiter(tmp_path, mine)
    with contextlib.closing(waiter(tmp_path, claim("b", "waits"))) as other:
        began = time.monotonic()
        lease = next(filter(None, (one.take() for _ in range(9))))
        assert lease is not None
        other.take()
        with lease:
            assert one._sharing is not None
            stay = GivingWay(one._sharing, lease, folder)
            while lease.holder.claim is None or not lease.holder.claim.sweep.elsewhere:
                stay._looked_at -= 10
                stay.asked()
                assert time.monotonic() < began + 10
            told = lease.holder.claim.sweep.elsewhere
    assert told == pytest.approx(100 + 2 + 0.5 * 98), "what does not answer counts as not begun"
    assert f"{alive.parent.parent.parent} does not answer" in caplog.text


def test_a_reader_that_hangs_holds_nothing_and_can_be_ended(tmp_path: Path) -> None:
    reader = ReaderApart(lambda: time.sleep(60))
    with open(tmp_path / "lease", "w") as lease:
        fcntl.flock(lease, fcntl.LOCK_EX)
        reader.start()
        assert reader.answer(0.2) is None
    assert reader.is_reading
    assert not is_locked(tmp_path / "lease"), "a device would stay held"
    assert reader._process is not None
    signal.pidfd_send_signal(reader._process, signal.SIGKILL)
    assert reader.answer(5) is None
    assert not reader.is_reading


def test_several_may_read_the_same_at_once_until_it_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As two who look at the page of the cluster."""
    monkeypatch.setattr(read_apart, "_HANGS_SECONDS", 0.3)
    begun, goes_on = list[int](), threading.Event()

    def read() -> str:
        begun.append(1)
        goes_on.wait(60)
        return "it"

    with ThreadPoolExecutor() as pool:
        both = [pool.submit(read_apart.within, 60.0, "a folder", read) for _ in range(2)]
        while len(begun) < 2:
            time.sleep(0.01)
        time.sleep(0.4)
        for _ in range(2):
            with pytest.raises(TimeoutError):
                read_apart.within(60.0, "a folder", read)
        goes_on.set()
        assert [one.result() for one in both] == ["it", "it"]
    assert read_apart.within(60.0, "a folder", read) == "it"
    assert len(begun) == 3


def test_what_is_no_file_holds_nobody_up(tmp_path: Path) -> None:
    write(tmp_path, "a", {"one": "here"})
    (path,) = (tmp_path / "sweeps" / ".active").iterdir()
    path.unlink()
    os.mkfifo(path)
    mine = claim("a", "one")
    rest = RestOfSweep(str(tmp_path), "a")
    rest.see([mine])
    assert rest.put_in(mine) == mine
    assert Ledger(tmp_path).sweeps() == []


def test_a_run_reads_it_where_its_spec_names_the_home(tmp_path: Path) -> None:
    spec = replace(spec_for(tmp_path, small_job()), claim=claim("a", "one"))
    for home, reads in (("", False), (str(tmp_path), True)):
        turns = TurnsOfRun(type(spec).from_dict(replace(spec, home=home).to_dict()), DEVICES)
        assert turns.sharing is not None
        assert (turns.sharing.rest is not None) is reads
    assert time.time() > 0
