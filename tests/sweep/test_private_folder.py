"""Who may look into what sweeps keep; with real users, who take root to become."""

from __future__ import annotations

import grp
import os
import pickle
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException

from saturn_airflow.operators.private_folder import close_to_others

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming other users takes root")
ANN, BOB, GPU = 61001, 61002, 61100


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder to be made by ann."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o777)
    umask = os.umask(0o022)
    yield path / "saturn"
    os.umask(umask)
    shutil.rmtree(path)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__SATURN__GROUP", "gpu-users")
    known = grp.struct_group(("gpu-users", "x", GPU, []))
    monkeypatch.setattr(grp, "getgrnam", lambda name: {"gpu-users": known}[name])


def as_user(uid: int, what: Callable[[], Any], groups: tuple[int, ...] = ()) -> Any:
    """Do ``what`` as this user in a process of its own; its exceptions are raised here."""
    ours, theirs = os.pipe()
    if os.fork() == 0:
        try:
            os.setgroups(groups)
            os.setgid(uid)
            os.setuid(uid)
            said = True, what()
        except Exception as error:
            said = False, error
        os.write(theirs, pickle.dumps(said))
        os._exit(0)
    good, value = pickle.loads(os.read(ours, 1 << 16))
    os.wait()
    if not good:
        raise value
    return value


def write_state(home: Path) -> None:
    close_to_others(home)
    job = home / "sweeps" / "dag" / "run" / "sweep" / "job"
    job.mkdir(parents=True, exist_ok=True)
    with open(job / "spec.json", "a") as file:
        file.write("{}")


def read_state(home: Path) -> list[str]:
    return [path.read_text() for path in home.rglob("*.json")] if os.access(home, os.X_OK) else []


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@as_root
def test_nobody_else_looks_into_it(home: Path) -> None:
    as_user(ANN, lambda: write_state(home))
    assert mode(home / "sweeps") == 0o700
    assert as_user(ANN, lambda: read_state(home)) == ["{}"]
    assert as_user(BOB, lambda: read_state(home)) == []
    with pytest.raises(AirflowFailException, match=r"closed to user 61002: .* \[saturn\] group"):
        as_user(BOB, lambda: write_state(home))


@as_root
def test_what_a_version_before_left_open_is_closed(home: Path) -> None:
    as_user(ANN, lambda: (home / "sweeps").mkdir(parents=True))
    assert mode(home / "sweeps") == 0o755
    as_user(ANN, lambda: write_state(home))
    assert as_user(BOB, lambda: read_state(home)) == []


@as_root
def test_members_of_the_group_work_in_it_together(home: Path, group: None) -> None:
    as_user(ANN, lambda: write_state(home), (GPU,))
    as_user(BOB, lambda: write_state(home), (GPU,))
    assert as_user(ANN, lambda: read_state(home), (GPU,)) == ["{}{}"]
    assert as_user(BOB, lambda: read_state(home)) == [], "no member now"
    (path,) = home.rglob("*.json")
    assert (mode(path), path.stat().st_gid) == (0o660, GPU)


@as_root
def test_a_folder_that_root_made_stays_and_what_is_in_it_is_closed(home: Path) -> None:
    home.mkdir()
    home.chmod(0o1777)
    as_user(ANN, lambda: write_state(home))
    assert (mode(home), mode(home / "sweeps")) == (0o1777, 0o700)
    assert as_user(BOB, lambda: [str(path) for path in home.rglob("spec.json")]) == []


def test_a_group_that_is_not_there_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__SATURN__GROUP", "no-such-group")
    with pytest.raises(AirflowFailException, match="no such group"):
        close_to_others(home)
