"""A ``Trainer``'s checkpoints, as it writes them, and beside them what makes sure that they are whole."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from saturn_airflow.launch import handed_over
from saturn_airflow.model import disks, json_text
from saturn_airflow.model.disks import write_whole
from saturn_airflow.model.errors import DiskError, JobError

# From which format on each of these is known. What has none of them is of 1, so that earlier versions of
# Saturn go on from it.
_FORMAT = 4
_ADDED = {"added": 4, "position": 3, "changed_arguments": 3, "fetched": 3, "beside": 2}
MANIFEST = "saturn.json"
#: Bytes of a file that are read at once.
_PART = 1 << 20
# As a Trainer names them; copies that somebody made are none.
_NAME = re.compile(r"checkpoint-[0-9]+")
# The Trainer's arguments as they are, such as a token of a hub; nobody reads them to go on.
_ARGUMENTS = "training_args.bin"


def write_manifest(checkpoint: Path, facts: Mapping[str, Any]) -> None:
    """Say of a checkpoint that it is whole, and what else is to be known of it, JSON-ready."""
    digests = {}
    number = max((added for name, added in _ADDED.items() if facts.get(name)), default=1)
    arguments = checkpoint / _ARGUMENTS
    if arguments.is_file() and handed_over.is_in(arguments.read_bytes()):
        arguments.unlink()
    for path in _files(checkpoint):
        digests[str(path.relative_to(checkpoint))] = _digest(path, on_disk=True)
    write_whole(checkpoint / MANIFEST, json.dumps({"format": number, **facts, "files": digests}))


def remove_others(folder: Path, *kept: str | None) -> None:
    """Remove the checkpoints that are not whole, which would count where a Trainer keeps the newest few.

    :param kept: paths of those that stay all the same, such as the best.
    """
    names = {Path(path).name for path in kept if path is not None}
    for path in folder.glob("checkpoint-*"):
        if _NAME.fullmatch(path.name) and path.name not in names and not (path / MANIFEST).exists():
            shutil.rmtree(path, ignore_errors=True)


def newest(folder: Path, warn: Callable[[str], object]) -> tuple[Path, dict[str, Any]] | None:
    """The newest whole checkpoint and what was said of it.

    :param warn: is told of those that are damaged.
    :raises JobError: for one of a later format, and for one that may not be read.
    :raises DiskError: when a disk fails, and none is left that can be read.
    """
    there = [path for path in folder.glob("checkpoint-*") if _NAME.fullmatch(path.name)]
    failed: OSError | None = None
    for path in sorted(there, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True):
        try:
            # Without a manifest, its writing was interrupted, or it is the best, and none to go on from.
            if not (path / MANIFEST).is_file():
                continue
            facts = _facts(path)
        except PermissionError as error:
            raise JobError(
                f"{error.filename} can't be read ({error.strerror}), and may be whole: let the user that "
                f"trains read it; or move {path} away, and the job goes on from what is left"
            ) from None
        except OSError as error:
            facts, failed = None, failed or error
        if facts is not None:
            return path, facts
        warn(f"{path} is damaged; training goes on from the one before it")
    if failed is not None and disks.is_fault(failed):
        raise DiskError(
            f"no checkpoint in {folder} can be read ({failed.strerror}): look after that disk; where they "
            "are lost, move them away, and the job starts from the beginning"
        )
    return None


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> Sequence[str]:
    """What a training was told otherwise before."""
    return [
        f"{name} was {before.get(name, 'not there')} and is {now.get(name, 'not there')}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]


def _facts(checkpoint: Path) -> dict[str, Any] | None:
    try:
        facts: dict[str, Any] = json_text.parse((checkpoint / MANIFEST).read_text())
        number, digests = int(facts["format"]), dict(facts["files"])
    except (ValueError, KeyError, TypeError):
        return None
    if number > _FORMAT:
        raise JobError(f"{checkpoint} is of format {number}, which a later version of Saturn wrote")
    for name, digest in digests.items():
        try:
            if _digest(checkpoint / name) != digest:
                return None
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None
    return facts


def _digest(path: Path, *, on_disk: bool = False) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        if on_disk:
            os.fsync(file.fileno())
        while part := file.read(_PART):
            found.update(part)
    return found.hexdigest()


def _files(checkpoint: Path) -> list[Path]:
    return sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name != MANIFEST)
