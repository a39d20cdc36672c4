"""A folder for the temporary files of a run, which goes with its supervisor, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from saturn_airflow.launch import trusted_folder

#: Where torch keeps what it compiled.
COMPILED = "TORCHINDUCTOR_CACHE_DIR"
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


def why_not_compiled_there(instead: Path) -> str | None:
    """Keep other users out of what ``torch.compile`` keeps between runs, which is code that is run.

    By default torch keeps it in the folder for temporary files, under a name that others can make first.

    :param instead: a folder of this run's, for where they did.
    :returns: why that is used, in words; None where it need not be.
    """
    if os.environ.get(COMPILED):
        return None
    usual = Path(tempfile.gettempdir(), f"torchinductor_{_user()}")
    try:
        with contextlib.suppress(FileExistsError):
            usual.mkdir(0o700)
        facts = usual.lstat()
        own = stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid()
        if own and not trusted_folder.is_writable_by_others(facts):
            return None
        why = "others may write there" if own else "which another user made"
    except OSError as error:
        why = str(error)
    os.environ[COMPILED] = str(instead / "compiled")
    return (
        f"what torch.compile makes is not kept in {usual} ({why}), and is made anew in each run; to keep it, "
        f"set {COMPILED} for workers to a folder of theirs alone"
    )


def _user() -> str:
    """As torch has it: torch._inductor.runtime.cache_dir_utils.default_cache_dir."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid_{os.getuid()}"
    return re.sub(r'[\\/:*?"<>|]', "_", user)


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
