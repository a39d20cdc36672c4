"""Who may look into what sweeps keep; with real users, who take root to become."""

from __future__ import annotations

import grp
import os
import pickle
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from airflow.sdk.exceptions import AirflowFailException

from saturn_airflow import library
from saturn_airflow.launch import rights
from saturn_airflow.model.cluster import Node
from saturn_airflow.model.errors import DiskError, InvalidSweepError
from saturn_airflow.model.folders import TECHNIQUES_VARIABLE
from saturn_airflow.model.outcomes import Outcome
from saturn_airflow.model.status import Status
from saturn_airflow.operators import drains, inventory, leftovers
from saturn_airflow.operators.context import SweepContext
from saturn_airflow.operators.private_folder import close_to_others
from saturn_airflow.training.ranks import Ranks
from saturn_airflow.training.shared_folder import DiskOfCheckpointsError, SharedFolder

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


@as_root
def test_a_sweep_in_a_folder_of_another_user_is_told_whose_it_is_and_how_to_mend_it(home: Path) -> None:
    """Such as one that root made by hand: its tasks are tried again, and go on once it is mended."""
    group = home / "sweeps" / "dag" / "run" / "sweep"
    as_user(ANN, lambda: write_state(home))
    (group / "job").chmod(0o755)
    os.chown(group / "job", 0, 0)
    told = (
        rf"job can't be written by user {ANN}: {group / 'job'} belongs to user root and has mode 0755; give "
        rf"it back to {ANN} \(chown -R {ANN} "
    )
    with pytest.raises(DiskError, match=told):
        as_user(ANN, lambda: rights.check_may_write(group / "job"))
    with pytest.raises(DiskError, match="0755"):
        as_user(ANN, lambda: rights.check_may_write(group / "job" / "runs" / "0001"))
    as_user(ANN, lambda: rights.check_may_write(group / "another job"))
    with pytest.raises(DiskError, match="sweeps belongs to user 61001 and has mode 0700"):
        as_user(BOB, lambda: rights.check_may_write(group / "job"))


@as_root
def test_checkpoints_that_wait_for_the_right_to_be_written_cost_a_job_none_of_its_tries(home: Path) -> None:
    folder, ranks = home / "checkpoints", Ranks(rank=0, size=1, device=torch.device("cpu"))
    folder.mkdir(parents=True)
    with pytest.raises(DiskOfCheckpointsError, match=r"no checkpoint .* belongs to user root"):
        as_user(ANN, lambda: SharedFolder(folder, ranks, None, print))


@as_root
def test_a_job_whose_folder_is_closed_to_the_report_keeps_no_other_from_being_reported(home: Path) -> None:
    sweep = SweepContext("dag", "run", "sweep", home / "sweeps" / "dag" / "run" / "sweep")

    def report() -> list[str]:
        jobs = leftovers.readable(sweep, ["a", "b", "never begun"])
        leftovers.stop_leftovers(sweep, jobs)
        told = [Outcome(job=job, status=Status.LOST) for job in ("a", "b")]
        return [f"{o.job} {o.status}" for o in leftovers.with_last_checkpoints(sweep, told, jobs)]

    for job in ("a", "b"):
        as_user(ANN, partial((sweep.job_folder(job) / "runs").mkdir, parents=True))
    sweep.job_folder("a").chmod(0o700)
    os.chown(sweep.job_folder("a"), 0, 0)
    assert as_user(ANN, report) == ["a lost", "b lost"]
    assert as_user(ANN, lambda: leftovers.readable(sweep, "ab")) == {"b"}


@as_root
def test_what_root_says_of_nodes_is_for_all_users_whatever_its_umask(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``sudo saturn drain`` on a machine whose root has umask 077: what is drained must not be used."""
    monkeypatch.setenv("AIRFLOW__SATURN__HOME", str(home))
    as_user(ANN, lambda: write_state(home))
    os.umask(0o077)
    drains.drain("gpu-b", "new disks")
    inventory.announce(Node("gpu-a", devices=2, kind="cpu"))
    inventory.record_pools({"saturn.gpu-a": 4})
    assert as_user(ANN, drains.drained) == {"gpu-b": "it is drained (new disks)"}
    assert [node.name for node in as_user(ANN, inventory.announced_nodes)] == ["gpu-a"]
    assert as_user(ANN, inventory.recorded_pools) == {"saturn.gpu-a": 4}
    for path in home.glob("*/*.json"):
        path.chmod(0o600)
    (home / "pools.json").chmod(0o600)
    assert "who may read" in as_user(ANN, drains.drained)["gpu-b"]
    with pytest.raises(InvalidSweepError, match=r"gpu-a\.json; let all users read it"):
        as_user(ANN, inventory.announced_nodes)
    with pytest.raises(InvalidSweepError, match=r"pools\.json; let all users read it"):
        as_user(ANN, inventory.recorded_pools)


@as_root
def test_techniques_that_may_not_be_read_are_told_and_not_left_out(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = home / "techniques"
    monkeypatch.setenv(TECHNIQUES_VARIABLE, f"{home / 'missing'}:{folder}")
    as_user(ANN, lambda: folder.mkdir(parents=True))
    (folder / "closed.py").write_text("")
    (folder / "closed.py").chmod(0o600)
    assert "closed" in as_user(ANN, library.names)
    with pytest.raises(InvalidSweepError, match=r"technique 'closed': .*Permission denied"):
        as_user(ANN, lambda: library.get("closed"))
    folder.chmod(0o700)
    with pytest.raises(InvalidSweepError, match=rf"{folder} can't be read .* \(chmod -R a\+rX"):
        as_user(BOB, library.names)
