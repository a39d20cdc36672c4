"""Temporary files of runs."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from saturn_airflow.launch import scratch

MAKER = """
from saturn_airflow.launch import scratch
folder = scratch.folder()
print(folder.__enter__(), flush=True)
input()
"""


def test_what_killed_launches_left_goes_after_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folders = [tmp_path / f"saturn-ranks-{age}" for age in ("old", "new")]
    files = [tmp_path / f"saturn-stack-{age}" for age in ("old", "new")]
    for folder, file in zip(folders, files, strict=True):
        folder.mkdir()
        (folder / "meeting").touch()
        file.touch()
    for path in (folders[0], files[0]):
        os.utime(path, (1e9, 1e9))
    with scratch.folder():
        left = {path for path in tmp_path.iterdir() if not path.match("saturn-run-*")}
        assert left == {folders[1], files[1]}


def test_a_folder_of_a_run_goes_with_it_and_those_of_lost_ones_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(scratch, "_LOCKED_AFTER_SECONDS", 0.0)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    maker = subprocess.Popen([sys.executable, "-c", MAKER], env=environment, text=True, **pipes)  # type: ignore[call-overload]
    theirs = Path(maker.stdout.readline().strip())
    with scratch.folder() as mine:
        assert theirs.is_dir(), "it is held"
        maker.kill()
        maker.communicate()
        with scratch.folder():
            assert not theirs.exists()
            assert Path(mine).is_dir()
    assert not list(tmp_path.iterdir())
