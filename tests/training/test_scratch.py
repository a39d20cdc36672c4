"""Temporary files of runs."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from saturn_airflow.launch import launching, scratch

MAKER = """
from saturn_airflow.launch import launching, scratch
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


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files, as machines have it; what is set for torch is put back afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o1777)
        monkeypatch.setenv(scratch.COMPILED, "put back after the test")
        monkeypatch.delenv(scratch.COMPILED)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def usual() -> Path:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return Path(default_cache_dir())


def test_what_torch_compiles_is_where_it_was_and_closed(temporary: Path, tmp_path: Path) -> None:
    for _ in range(2):
        assert scratch.why_not_compiled_there(tmp_path) is None
    assert scratch.COMPILED not in os.environ
    assert usual().parent == temporary
    assert stat.S_IMODE(usual().stat().st_mode) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming other users takes root")
@pytest.mark.parametrize("how", ["made first", "a link", "open to all"])
def test_what_another_user_could_change_is_not_run(how: str, temporary: Path, tmp_path: Path) -> None:
    eve = 61003
    if how == "a link":
        (tmp_path / "eves").mkdir()
        usual().symlink_to(tmp_path / "eves")
        os.chown(usual(), eve, eve, follow_symlinks=False)
        os.chown(tmp_path / "eves", eve, eve)
    else:
        usual().mkdir()
        usual().chmod(0o777 if how == "open to all" else 0o755)
        if how == "made first":
            os.chown(usual(), eve, eve)
    why = scratch.why_not_compiled_there(tmp_path)
    assert why is not None
    assert str(usual()) in why
    assert os.environ[scratch.COMPILED] == str(tmp_path / "compiled")


def test_who_says_where_is_obeyed(temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(scratch.COMPILED, "/elsewhere")
    assert scratch.why_not_compiled_there(tmp_path) is None
    assert os.environ[scratch.COMPILED] == "/elsewhere"


def test_who_cleans_the_temporary_folder_keeps_no_rank_from_being_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As tmpreaper does below a job of weeks."""
    monkeypatch.setattr(launching, "scratch", str(tmp_path / "cleaned"))
    monkeypatch.setattr(launching, "launch", lambda *_, **__: [{}])
    assert launching.launch_ranks(b"", 1, device_type="cpu", threads=1) == [{}]
