"""Leases on a machine with several users: real users, who may be careless, and some who are hostile."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from saturn_airflow.launch import failures, leases
from saturn_airflow.launch.lease_folder import FOLDER_VARIABLE
from saturn_airflow.launch.leases import GivenUpError, Waiter
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.status import Status

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="becoming other users takes root")

ANN, BOB, EVE = 61001, 61002, 61003
GPU = 61100
T = TypeVar("T")


@pytest.fixture
def machine() -> Iterator[Path]:
    """A folder that all users can look into, on a machine where root's umask is the usual one."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def shared(machine: Path) -> Path:
    """What docs/security.md has the administrator make for a group."""
    folder = machine / "leases"
    for path in (folder, folder / "devices", folder / "tickets"):
        path.mkdir()
        os.chown(path, 0, GPU)
        path.chmod(0o3770)
    return folder


def as_user(uid: int, what: Callable[[], T], groups: tuple[int, ...] = ()) -> T:
    """Do ``what`` as this user in a process of its own; its exceptions are raised here."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        status: tuple[bool, Any]
        try:
            os.setgroups(groups)
            os.setgid(uid)
            os.setuid(uid)
            os.umask(0o022)
            status = True, what()
        except BaseException as error:
            # pytest's own, such as that of what was not raised, do not pickle.
            status = False, error if isinstance(error, Exception) else AssertionError(str(error))
        with os.fdopen(theirs, "wb") as pipe:
            pipe.write(pickle.dumps(status))
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        good, value = pickle.loads(pipe.read())
    os.waitpid(pid, 0)
    if not good:
        raise value
    result: T = value
    return result


def take(folder: Path, device: str = "gpu0") -> str:
    with leases.acquire([device], "a job", folder=folder, give_up=lambda: True):
        return "held"


def own_folder(machine: Path, uid: int, mode: int = 0o755) -> Path:
    home = machine / f"user-{uid}"
    home.mkdir()
    os.chown(home, uid, uid)
    home.chmod(mode)
    return home


def test_users_of_a_group_share_devices(shared: Path) -> None:
    def be_bob() -> tuple[str, list[str], list[str]]:
        with pytest.raises(GivenUpError):
            leases.acquire(["gpu0"], "bob's job", folder=shared, give_up=lambda: True)
        with leases.acquire(["gpu1"], "bob's job", folder=shared):
            found = leases.holders(shared)
        return found["gpu0"].who, sorted(found), leases.ignored(shared)

    assert as_user(ANN, lambda: take(shared), (GPU,)) == "held"
    with leases.acquire(["gpu0"], "ann's job", folder=shared):
        assert as_user(BOB, be_bob, (GPU,)) == ("ann's job", ["gpu0", "gpu1"], [])
    assert as_user(BOB, lambda: take(shared), (GPU,)) == "held"
    assert {stat.S_IMODE(path.stat().st_mode) for path in (shared / "devices").iterdir()} == {0o660}
    assert {path.stat().st_gid for path in shared.rglob("*")} == {GPU}


def test_who_is_not_of_the_group_gets_nowhere(shared: Path) -> None:
    as_user(ANN, lambda: take(shared), (GPU,))
    with pytest.raises(InvalidSweepError, match="can't be used"):
        as_user(EVE, lambda: take(shared))
    with pytest.raises(PermissionError):
        as_user(EVE, lambda: os.open(shared / "gate", os.O_RDONLY))


def test_a_folder_that_another_user_owns_by_then_costs_who_waits_no_try(shared: Path) -> None:
    """It is tried again until somebody has mended it; who trains has its devices."""
    shared.chmod(0o755)
    with pytest.raises(InvalidSweepError, match="it has mode 0755") as raised:
        as_user(ANN, lambda: take(shared), (GPU,))
    failure = failures.before_launch(raised.value)
    assert (failure.status, failure.whose) == (Status.LOST, "node")
    wrong = failures.before_launch(InvalidSweepError("a sweep that can't be right as it is written"))
    assert (wrong.status, wrong.whose) == (Status.FAILED, "")
    shared.chmod(0o3770)
    assert as_user(ANN, lambda: take(shared), (GPU,)) == "held"


@pytest.mark.slow
def test_members_can_not_remove_what_others_hold_or_wait_with(shared: Path) -> None:
    as_user(ANN, lambda: take(shared), (GPU,))
    with leases.acquire(["gpu0"], "root's job", folder=shared):
        waiter = Waiter(["gpu0"], "root waits", folder=shared)
        for path in [shared / "devices" / "gpu0", shared / "gate", *(shared / "tickets").iterdir()]:
            with pytest.raises(PermissionError):
                as_user(BOB, path.unlink, (GPU,))
            with pytest.raises(PermissionError):
                as_user(BOB, lambda path=path: path.rename(path.with_name("x")), (GPU,))  # type: ignore[misc]
        waiter.close()


def test_a_dead_ticket_is_removed_by_its_owner_alone(shared: Path) -> None:
    as_user(ANN, lambda: bool(Waiter(["gpu0"], "ann, who dies waiting", folder=shared)), (GPU,))
    assert len(list((shared / "tickets").iterdir())) == 1
    assert as_user(BOB, lambda: leases.waiters(shared), (GPU,)) == []
    assert len(list((shared / "tickets").iterdir())) == 1
    assert as_user(ANN, lambda: take(shared), (GPU,)) == "held"
    assert list((shared / "tickets").iterdir()) == []


@pytest.mark.slow
def test_a_folder_of_another_user_is_not_used(machine: Path) -> None:
    eves = own_folder(machine, EVE)
    as_user(EVE, lambda: take(eves / "leases"))
    os.chmod(eves / "leases", 0o777)
    for who in (ANN, 0):
        with pytest.raises(InvalidSweepError, match=f"belongs to user {EVE}"):
            as_user(who, lambda: take(eves / "leases"))


@pytest.mark.parametrize("parts", ["", "ann/leases"])
def test_no_parent_may_be_another_users_or_open_to_others(parts: str, machine: Path) -> None:
    common = machine / "common"
    common.mkdir()
    common.chmod(0o777)
    folder = common / parts / "leases"
    with pytest.raises(InvalidSweepError, match=r"common has mode 0777"):
        as_user(ANN, lambda: take(folder))
    assert list(common.iterdir()) == []
    common.chmod(0o1777)
    assert as_user(ANN, lambda: take(folder)) == "held"


def test_a_part_that_another_member_made_is_not_used(shared: Path) -> None:
    (shared / "tickets").rmdir()
    with pytest.raises(InvalidSweepError, match="tickets is missing in it, which its owner makes"):
        as_user(ANN, lambda: take(shared), (GPU,))
    as_user(EVE, lambda: (shared / "tickets").mkdir(0o770), (GPU,))
    with pytest.raises(InvalidSweepError, match=f"tickets belongs to user {EVE}"):
        as_user(ANN, lambda: take(shared), (GPU,))


def test_links_of_others_are_not_followed(machine: Path) -> None:
    home, common = own_folder(machine, ANN), machine / "common"
    common.mkdir()
    common.chmod(0o1777)
    as_user(EVE, lambda: (common / "leases").symlink_to(home / "papers"))
    with pytest.raises(InvalidSweepError, match=f"leases belongs to user {EVE}"):
        as_user(ANN, lambda: take(common / "leases" / "deeper"))
    with pytest.raises(InvalidSweepError):
        as_user(ANN, lambda: take(common / "leases"))
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("part", ["tickets", "devices", "gate"])
def test_a_part_that_is_a_link_removes_and_writes_nothing(part: str, machine: Path) -> None:
    """Such a folder was possible before: its parts were open to all."""
    folder, papers = own_folder(machine, ANN), own_folder(machine, BOB)
    os.chown(papers, ANN, ANN)
    paper = papers / ("a" * 32)
    paper.write_text("{}")
    os.chown(paper, ANN, ANN)
    os.symlink(paper if part == "gate" else papers, folder / part)
    with pytest.raises(InvalidSweepError, match=r"link|used"):
        as_user(ANN, lambda: take(folder))
    assert paper.read_text() == "{}"


def test_what_hostile_members_put_into_the_line_is_skipped_and_told(shared: Path) -> None:
    as_user(ANN, lambda: take(shared), (GPU,))
    good = {
        "holder": {"who": "eve", "pid": 1, "since": 0.0},
        "wanted": ["gpu0"],
        "need": 1,
        "priority": [0, 0],
    }
    broken = [
        b"",
        b"{",
        b"[" * 100_000,
        b"null",
        json.dumps({**good, "holder": None}).encode(),
        json.dumps({key: good[key] for key in good if key != "holder"}).encode(),
        json.dumps({**good, "need": 10**9}).encode(),
        json.dumps({**good, "priority": [float("nan"), 0]}).encode(),
        json.dumps({**good, "priority": [-(10**400), 0]}).encode(),
        json.dumps({**good, "wanted": [[]]}).encode(),
        json.dumps({**good, "wanted": "gpu0"}).encode(),
    ]
    victim = shared.parent / "victim"
    victim.write_text("root's")

    def sabotage() -> None:
        import fcntl

        for number, content in enumerate(broken):
            file = os.open(shared / "tickets" / f"{number:032x}", os.O_RDWR | os.O_CREAT, 0o660)
            os.write(file, content)
            fcntl.flock(file, fcntl.LOCK_EX)
        (shared / "tickets" / ("b" * 32)).symlink_to(victim)
        os.mkfifo(shared / "tickets" / ("c" * 32), 0o660)
        (shared / "tickets" / ("d" * 32)).mkdir()
        (shared / "tickets" / "notes\n\x1b[2J.txt").touch()
        (shared / "devices" / "gpu7").symlink_to(victim)
        told: list[str] = []
        with leases.acquire(["gpu1"], "job", folder=shared, on_ignored=told.append):
            pass
        names = leases.ignored(shared)
        assert len(names) == len(broken) + 5, names
        assert all(name.isprintable() for name in names)
        with leases.acquire(["gpu0"], "job", folder=shared), pytest.raises(GivenUpError):
            leases.acquire(["gpu0"], "job", folder=shared, on_ignored=told.append, give_up=lambda: True)
        assert sorted(told) == names
        with pytest.raises(InvalidSweepError, match="gpu7 can't be taken: its file is a link"):
            take(shared, "gpu7")

    as_user(EVE, sabotage, (GPU,))
    assert victim.read_text() == "root's"
    # Root, to whom all tickets are open, removes none of them, the dead ones included.
    before = sorted(os.listdir(shared / "tickets"))
    assert take(shared) == "held"
    assert sorted(os.listdir(shared / "tickets")) == before


def test_words_of_others_do_not_reach_a_terminal_as_they_are(shared: Path) -> None:
    with leases.acquire(["gpu0"], "a\x1b]0;b\n" + "c" * 5000, folder=shared):
        (holder,) = leases.holders(shared).values()
    assert holder.who.isprintable()
    assert len(holder.who) <= 500


def test_a_hard_link_is_not_written_to(machine: Path) -> None:
    folder = own_folder(machine, ANN)

    def be_ann() -> str:
        take(folder, "other")
        (folder / "paper").write_text("precious")
        os.link(folder / "paper", folder / "devices" / "gpu0")
        with pytest.raises(InvalidSweepError, match="hard link"):
            take(folder)
        return (folder / "paper").read_text()

    assert as_user(ANN, be_ann) == "precious"


def old_folder(folder: Path, *owners: int) -> Path:
    """A folder as version 0.1 made it: open to all."""
    for part in (folder, folder / "devices", folder / "tickets"):
        part.mkdir()
        os.chown(part, owners[0], owners[0])
        part.chmod(0o777)
    for number, owner in enumerate(owners):
        for path in (folder / "devices" / f"gpu{number}", *([folder / "gate"] if number == 0 else [])):
            path.touch()
            os.chown(path, owner, owner)
            path.chmod(0o666)
    return folder


def test_a_folder_of_the_version_before_is_closed_and_goes_on(machine: Path) -> None:
    folder = old_folder(own_folder(machine, ANN) / "leases", ANN, ANN)
    assert as_user(ANN, lambda: take(folder)) == "held"
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*") if path.is_dir()} == {0o700}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_that_users_shared_without_a_group_is_refused_with_the_way_out(machine: Path) -> None:
    folder = old_folder(own_folder(machine, ANN) / "leases", ANN, BOB)
    with pytest.raises(InvalidSweepError, match=rf"user {BOB} did \(gpu1\).*install -d -g GROUP -m 3770"):
        as_user(ANN, lambda: take(folder))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o777, "left as it was"


def test_the_default_is_in_the_users_home(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(machine))
    assert leases.default_folder() == Path("/root/.local/state/saturn/leases")
    with pytest.raises(InvalidSweepError, match=f"user {EVE} has no home folder"):
        as_user(EVE, leases.default_folder)


def test_the_earlier_default_is_used_on_by_its_owner_alone(
    machine: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(machine))
    earlier = old_folder(machine / "saturn-leases", 0)
    assert leases.default_folder() == earlier
    assert not caplog.messages
    shutil.rmtree(earlier)
    old_folder(earlier, EVE)
    assert leases.default_folder() != earlier
    assert "another user's and is not used" in caplog.text
