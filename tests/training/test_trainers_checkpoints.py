"""Which of a ``Trainer``'s checkpoints is gone on from."""

from __future__ import annotations

import errno
import io
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from saturn_airflow.model.errors import DiskError, JobError
from saturn_airflow.training.trainers import whole_checkpoints


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for step in (4, 8):
        path = tmp_path / f"checkpoint-{step}"
        path.mkdir()
        (path / "model.safetensors").write_bytes(b"weights" * step)
        whole_checkpoints.write_manifest(path, {"step": step})
    return tmp_path


def _newest(folder: Path) -> str | None:
    found = whole_checkpoints.newest(folder, lambda warning: None)
    return None if found is None else found[0].name


def test_a_copy_that_somebody_made_is_none(folder: Path) -> None:
    shutil.copytree(folder / "checkpoint-8", folder / "checkpoint-8-before-lunch")
    assert _newest(folder) == "checkpoint-8"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO], ids=os.strerror)
@pytest.mark.parametrize("place", [whole_checkpoints.MANIFEST, ".safetensors"])
@pytest.mark.parametrize("which", ["checkpoint-", "checkpoint-8"])
def test_what_may_be_whole_and_can_not_be_read_is_no_reason_to_start_over(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int, place: str, which: str
) -> None:
    really = io.open

    def opened(file: Any, *args: Any, **kwargs: Any) -> Any:
        if which in str(file) and str(file).endswith(place):
            raise OSError(number, os.strerror(number), str(file))
        return really(file, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr("io.open", opened)
        if number == errno.EACCES:
            with pytest.raises(JobError, match=r"checkpoint-8/.* can't be read \(Permission denied\)"):
                _newest(folder)
        elif which == "checkpoint-":
            with pytest.raises(DiskError, match="look after that disk"):
                _newest(folder)
        else:
            assert _newest(folder) == "checkpoint-4"
    assert _newest(folder) == "checkpoint-8"
