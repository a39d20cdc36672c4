"""Checkpoints within a budget: what goes first, and what never does, whoever dies meanwhile."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saturn_airflow.launch import checkpoint_budget, checkpoint_files
from saturn_airflow.launch.checkpoint_budget import keep_to
from saturn_airflow.launch.checkpoint_files import HASH, MANIFEST

SIZE = 10_000


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path


def checkpoint(folder: Path, step: int, *, age: float = 0.0, whole: bool = True) -> Path:
    """A checkpoint of about ``SIZE`` bytes, written ``age`` seconds ago."""
    path = folder / "checkpoints" / f"step-{step:08d}"
    path.mkdir(parents=True)
    (path / "1.safetensors").write_bytes(os.urandom(SIZE))
    manifest = {"step": step, "files": {"1.safetensors": checkpoint_files.describe(path / "1.safetensors")}}
    (path / MANIFEST).write_text(json.dumps({**manifest, HASH: checkpoint_files.digest_of(manifest)}))
    if not whole:
        (path / "1.safetensors").write_bytes(b"x" * SIZE)
    os.utime(path, (1e9 - age,) * 2)
    return path


def base(folder: Path, *users: Path) -> Path:
    """What these checkpoints need beside them."""
    path = folder / "checkpoints" / f"{checkpoint_files.FROZEN}0123"
    path.mkdir()
    (path / "1.safetensors").write_bytes(os.urandom(SIZE))
    (path / MANIFEST).write_text(json.dumps({HASH: "x", "files": {}}))
    for user in users:
        manifest = checkpoint_files.manifest_of(user)
        manifest["frozen"] = {"folder": path.name, HASH: "x", "names": []}
        del manifest[HASH]
        (user / MANIFEST).write_text(json.dumps({**manifest, HASH: checkpoint_files.digest_of(manifest)}))
        os.utime(user, (user.stat().st_mtime,) * 2)
    os.utime(path, (1e9 - 1e6,) * 2)  # it was there before all of them
    return path


def ended(job: Path, status: str) -> None:
    run = job / "runs" / "0001"
    run.mkdir(parents=True)
    (run / "alive").write_text("1")
    (run / "events.jsonl").write_text(json.dumps({"event": "end", "status": status, "time": 1.0}) + "\n")


def sweep_of(home: Path) -> Path:
    return home / "sweeps" / "dag" / "run" / "sweep"


def left(home: Path) -> set[str]:
    return {str(path.parent.relative_to(sweep_of(home))) for path in sweep_of(home).rglob(MANIFEST)}


def test_superseded_ones_go_first_then_older_ones_then_those_of_finished_jobs(home: Path) -> None:
    sweep = sweep_of(home)
    a, b = sweep / "a", sweep / "b"
    ended(a, "stopped")
    ended(b, "finished")
    steps = "checkpoints/step-0000000"
    checkpoint(a / "superseded-1", 9, age=10)
    checkpoint(b / "superseded-1", 9, age=20)
    checkpoint(a, 1, age=40)
    checkpoint(a, 2, age=30)
    checkpoint(b, 1, age=60)
    checkpoint(b, 2, age=50)
    order = [
        f"b/superseded-1/{steps}9",
        f"a/superseded-1/{steps}9",
        f"a/{steps}1",
        f"b/{steps}1",
        f"b/{steps}2",
    ]
    everything = left(home)
    one = checkpoint_files.bytes_of(a / steps.replace("0000000", "00000001"))
    for gone in range(len(order) + 1):
        result = keep_to((len(everything) - gone) * one + 100, [sweep], "a test")
        assert left(home) == everything - set(order[:gone]), gone
        assert not result.over
    result = keep_to(1.0, [sweep], "a test")
    assert result.over
    assert left(home) == {f"a/{steps}2"}, "the only one of an unfinished job stays"
    assert checkpoint_files.why_removed(b / "checkpoints") == "a test"


def test_a_copy_that_somebody_made_stands_in_for_no_checkpoint(home: Path) -> None:
    job = sweep_of(home) / "a"
    ended(job, "stopped")
    newest = checkpoint(job, 2)
    copied = shutil.copytree(newest, newest.with_name("step-00000002-copy"))
    assert keep_to(1.0, [sweep_of(home)], "a test").removed == ()
    assert newest.exists()
    assert copied.exists()


def test_nothing_of_a_job_that_trains_goes_but_what_was_set_aside(home: Path) -> None:
    job = sweep_of(home) / "a"
    ended(job, "finished")
    checkpoint(job, 1)
    checkpoint(job, 2)
    aside = checkpoint(job / "superseded-1", 5)
    with open(job / "runs" / "0001" / "alive") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert keep_to(0.0, [sweep_of(home)], "a test").removed == (aside,)


def test_an_older_one_stays_where_no_newer_one_is_whole(home: Path) -> None:
    job = sweep_of(home) / "a"
    ended(job, "lost")
    old = checkpoint(job, 1)
    checkpoint(job, 2, whole=False)
    assert keep_to(0.0, [sweep_of(home)], "a test").removed == ()
    checkpoint(job, 3)
    assert old in keep_to(0.0, [sweep_of(home)], "a test").removed


def test_what_a_killed_one_left_half_removed_goes_and_is_read_by_nobody(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = sweep_of(home) / "a"
    ended(job, "stopped")
    checkpoint(job, 1)
    kept = checkpoint(job, 2)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", lambda path, **_: (Path(path) / MANIFEST).unlink())
        keep_to(SIZE * 1.5, [sweep_of(home)], "a test")
    assert [path.name for path in (job / "checkpoints").glob("step-*")] == [kept.name]
    keep_to(SIZE * 1.5, [sweep_of(home)], "a test")
    assert {path.name for path in (job / "checkpoints").iterdir()} == {kept.name, checkpoint_files.NOTE}


def test_leftovers_of_saves_and_damaged_ones_go_where_nobody_trains(home: Path) -> None:
    job = sweep_of(home) / "a"
    ended(job, "lost")
    kept = checkpoint(job, 3)
    for name in ("damaged-step-00000001", ".saving-step-00000004"):
        checkpoint(job, 7).rename(kept.with_name(name))
    keep_to(0.0, [sweep_of(home)], "a test")
    assert left(home) == {f"a/checkpoints/{kept.name}"}


def test_one_at_a_time_takes_them_away(home: Path) -> None:
    with checkpoint_budget.alone(home) as first, checkpoint_budget.alone(home) as second:
        assert (first, second) == (True, False)
    with checkpoint_budget.alone(home) as again:
        assert again


def test_where_nothing_can_be_removed_nothing_is_lost_and_it_is_said(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = sweep_of(home) / "a"
    ended(job, "finished")
    checkpoint(job, 1)

    def read_only(*_: object) -> None:
        raise OSError(30, os.strerror(30))

    monkeypatch.setattr(Path, "rename", read_only)
    result = keep_to(0.0, [sweep_of(home)], "a test")
    assert result.over
    assert not result.removed


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    jobs=st.lists(
        st.tuples(
            st.sampled_from(["finished", "stopped", "lost"]),
            st.lists(st.booleans(), max_size=3),
            st.integers(0, 2),
        ),
        max_size=4,
    ),
    budget=st.integers(0, 12),
)
def test_whatever_there_is_unfinished_jobs_keep_a_whole_one_and_no_more_goes_than_must(
    jobs: list[tuple[str, list[bool], int]], budget: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        sweep = sweep_of(Path(folder))
        had = {}
        for number, (status, wholes, aside) in enumerate(jobs):
            job = sweep / str(number)
            ended(job, status)
            for step, whole in enumerate(wholes, 1):
                checkpoint(job, step, whole=whole)
            for one in range(aside):
                checkpoint(job / "superseded-1", one + 1)
            had[job] = status != "finished" and any(wholes)
        before = checkpoint_budget.taken_by([sweep])
        result = keep_to(budget * SIZE, [sweep], "a test")
        for job, must_keep in had.items():
            there = [*(job / "checkpoints").glob("step-*")]
            if must_keep:
                assert any(checkpoint_files.damage(path) is None for path in there)
        assert result.bytes == checkpoint_budget.taken_by([sweep])
        assert result.over == (result.bytes > budget * SIZE)
        if result.removed:
            assert before > budget * SIZE
            assert result.bytes + 1.1 * SIZE > budget * SIZE, "one less would have done"


def test_what_checkpoints_need_beside_them_goes_with_the_last_of_them(home: Path) -> None:
    sweep = sweep_of(home)
    a, b = sweep / "a", sweep / "b"
    ended(a, "stopped")
    ended(b, "finished")
    of_a = base(a, checkpoint(a, 1, age=40), checkpoint(a, 2, age=30))
    of_b = base(b, checkpoint(b, 1, age=60), checkpoint(b, 2, age=50))
    of_old = base(a / "superseded-1", checkpoint(a / "superseded-1", 9, age=10))
    taken = checkpoint_budget.taken_by([sweep])
    assert taken > 8 * SIZE, "it counts"
    gone = []
    for budget in range(taken, 0, -SIZE // 2):
        keep_to(budget, [sweep], "a test")
        for path in (of_a, of_b, of_old):
            if path.exists():
                assert any(checkpoint_files.base_of(user) == path for user in path.parent.glob("step-*"))
            elif path not in gone:
                gone.append(path)
                assert not list(path.parent.glob("step-*"))
    assert gone == [of_old, of_b]
    assert [path.name for path in sorted((a / "checkpoints").glob("*/"))] == [of_a.name, "step-00000002"]
