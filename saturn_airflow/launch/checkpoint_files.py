"""Checkpoints as files: whole or not, how large, and taken away so that no half of one is left. No torch."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from saturn_airflow.model.disks import write_whole

MANIFEST = "manifest.json"
HASH = "sha256"
#: What names of folders begin with that are on their way out.
REMOVING = ".removing-"
#: Says which checkpoints were taken away, and why.
NOTE = "removed.json"
#: What names of folders begin with that hold what training leaves of a model as it was, for all checkpoints
#: of a job.
FROZEN = "frozen-"


def manifest_of(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint; empty where it can't be read."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def describe(path: Path) -> dict[str, Any]:
    """Size and digest of a file."""
    digest = hashlib.new(HASH)
    with open(path, "rb") as file:
        while block := file.read(2**22):
            digest.update(block)
        return {"bytes": file.tell(), HASH: digest.hexdigest()}


def digest_of(manifest: Mapping[str, Any]) -> str:
    """The digest that a manifest has of the rest of itself."""
    return hashlib.new(HASH, json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def is_whole(manifest: Mapping[str, Any]) -> bool:
    """Whether a manifest is as it was written."""
    rest = {key: value for key, value in manifest.items() if key != HASH}
    return HASH in manifest and digest_of(rest) == manifest[HASH]


def damage(path: Path, part: slice = slice(None)) -> str | None:
    """What is wrong with a checkpoint; None if nothing. All that is looked at is read.

    :param part: which of its files to look at, in the order of their names.
    """
    manifest = manifest_of(path)
    if HASH not in manifest:
        return f"{MANIFEST} is missing or unreadable"
    if not is_whole(manifest):
        return f"{MANIFEST} has changed"
    for name in sorted(manifest["files"])[part]:
        try:
            described = describe(path / name)
        except OSError as error:
            return f"{name}: {error.strerror}"
        if described != manifest["files"][name]:
            return f"{name} has changed"
    return None


def base_of(path: Path) -> Path | None:
    """The folder that a checkpoint needs beside it; None where it needs none."""
    told = manifest_of(path).get("frozen")
    return path.parent / told["folder"] if told else None


def damage_of_base(path: Path, part: slice = slice(None)) -> str | None:
    """What is wrong with the folder that a checkpoint needs beside it, as :func:`damage` tells it."""
    base = base_of(path)
    if base is None:
        return None
    if manifest_of(base).get(HASH, "") != manifest_of(path)["frozen"][HASH]:
        return f"{MANIFEST} has changed" if base.is_dir() else "nothing is there"
    return damage(base, part)


def unused(folder: Path) -> list[Path]:
    """The folders with what training leaves alone that no checkpoint in ``folder`` needs."""
    used = {base_of(path) for path in folder.glob("*/")}
    return [path for path in folder.glob(f"{FROZEN}*/") if path not in used]


def bytes_of(path: Path) -> int:
    """How much a checkpoint takes on disk, whole or not."""
    found = 0
    with contextlib.suppress(OSError), os.scandir(path) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                found += entry.stat(follow_symlinks=False).st_size
    return found


def remove(path: Path) -> None:
    """Take a checkpoint away: at once out of everybody's sight, then from the disk.

    Where that is interrupted, :func:`finish_removing` completes it.

    :raises OSError: when it can't be.
    """
    leaving = path.with_name(f"{REMOVING}{os.getpid()}-{path.name}")
    path.rename(leaving)
    shutil.rmtree(leaving, ignore_errors=True)


def finish_removing(folder: Path) -> None:
    """Complete what an interrupted :func:`remove` began among the checkpoints in ``folder``."""
    for path in folder.glob(f"{REMOVING}*"):
        shutil.rmtree(path, ignore_errors=True)


def note_removed(folder: Path, names: Iterable[str], why: str) -> None:
    """Note in a folder of checkpoints which of them were taken away on purpose."""
    with contextlib.suppress(OSError):
        write_whole(folder / NOTE, json.dumps({"checkpoints": sorted(names), "why": why}))


def why_removed(folder: Path) -> str | None:
    """Why checkpoints of this folder were taken away; None where none were."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads((folder / NOTE).read_text())["why"])
    return None
