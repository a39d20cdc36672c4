"""Checkpoints as files: whole or not, how large, and taken away so that no half of one is left. No torch."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from saturn_airflow.model import json_text
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

_STEP = re.compile(r"step-[0-9]+")
#: What the system says of a file that may be whole, and that this process can't read.
_WITHHELD = (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE)


def newest_first(paths: Iterable[Path]) -> list[Path]:
    """Those of ``paths`` that are named as checkpoints are, which copies that somebody made are not."""
    return sorted((path for path in paths if _STEP.fullmatch(path.name)), key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """The step that the name of a checkpoint tells."""
    return int(path.name.removeprefix("step-"))


def is_withheld(damage: str) -> bool:
    """Whether what :func:`damage` told is that this process may not read what may be whole."""
    return any(os.strerror(number) in damage for number in _WITHHELD)


def take_away(path: Path) -> None:
    """Remove what is at ``path``, a folder or a file; of a link, not what it leads to.

    :raises OSError: when it can't be.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def manifest_of(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint; empty where it can't be read."""
    with contextlib.suppress(OSError):
        return _read_manifest(path)
    return {}


def _read_manifest(path: Path) -> dict[str, Any]:
    text = (path / MANIFEST).read_bytes()
    with contextlib.suppress(ValueError):
        manifest = json_text.parse(text)
        if isinstance(manifest, dict):
            return manifest
    return {}


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
    try:
        manifest = _read_manifest(path)
    except OSError as error:
        return f"{MANIFEST}: {error.strerror}"
    if HASH not in manifest:
        return f"{MANIFEST} can't be parsed"
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
        return str(json_text.parse((folder / NOTE).read_text())["why"])
    return None
