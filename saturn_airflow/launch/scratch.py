"""A folder for the temporary files of a run, which goes with its supervisor, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "saturn-run-"
# Who makes a folder has locked it by then.
_LOCKED_AFTER_SECONDS = 5.0
# What launches without a supervisor leave where they are killed; they need it for moments, or have it open.
_LOOSE, _LOOSE_SECONDS = ("saturn-ranks-*", "saturn-stack-*"), 86400.0


@contextlib.contextmanager
def folder() -> Iterator[str]:
    """A new folder, held by a lock for as long as this process lives and uses it.

    First those are removed that nobody holds any more: their whole node was lost.
    """
    _remove_lost(Path(tempfile.gettempdir()))
    path = tempfile.mkdtemp(prefix=_PREFIX)
    held = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield path
    finally:
        os.close(held)
        shutil.rmtree(path, ignore_errors=True)


def _remove_lost(temporary: Path) -> None:
    for path in (path for pattern in _LOOSE for path in temporary.glob(pattern)):
        with contextlib.suppress(OSError):
            facts = path.lstat()
            if facts.st_uid == os.getuid() and time.time() - facts.st_mtime > _LOOSE_SECONDS:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    for path in temporary.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            facts = path.lstat()
            if facts.st_uid != os.getuid() or time.time() - facts.st_ctime < _LOCKED_AFTER_SECONDS:
                continue
            found = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(found)
