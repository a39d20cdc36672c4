"""Disks that are full or can't be written: the fault of a machine, whatever was to be written there."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from pathlib import Path

from saturn_airflow.model import sizes
from saturn_airflow.model.errors import DiskError, message_of

#: What the system says of a disk, rather than of what somebody does with it: it is full, a quota is, it was
#: mounted anew without the right to write, it fails, or its server has forgotten the folder.
_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE)
_FULL = (errno.ENOSPC, errno.EDQUOT)
#: Bytes that have to be free before a run is started: for what it says of itself before it trains.
_ROOM = 1 << 20


def is_fault(error: BaseException) -> bool:
    """Whether ``error`` says that a disk failed rather than what used it; also in the words of a library."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _FAULTS
    return not isinstance(error, OSError) and is_told(message_of(error))


def is_read_only(error: BaseException) -> bool:
    """Whether ``error`` says that a file system can't be written at all: a fault where this package writes;
    elsewhere it may be meant, as for a container's root."""
    return os.strerror(errno.EROFS) in message_of(error)


def is_told(text: str) -> bool:
    """Whether the system's words for such a fault stand in ``text``."""
    return any(os.strerror(number) in text for number in _FAULTS)


def is_denied(text: str) -> bool:
    """Whether the system's words for what a user may not do to a file stand in ``text``."""
    return any(os.strerror(number) in text for number in (errno.EACCES, errno.EPERM))


def is_full(text: str) -> bool:
    """Whether the system's words for a full disk stand in ``text``."""
    return any(os.strerror(number) in text for number in _FULL)


def fault(folder: Path, error: OSError) -> DiskError:
    """What to raise for ``error``, which somebody met who wrote to ``folder``."""
    told = error.strerror or str(error)
    fix = "free some space there" if is_full(told) else "look after that disk"
    return DiskError(f"{folder} can't be written ({told}): {left(folder)}; {fix}")


def check_room(folder: Path) -> None:
    """Check that a run can say what becomes of it.

    :raises DiskError: when its disk is full.
    """
    if shutil.disk_usage(disk_of(folder)).free < _ROOM:
        raise fault(folder, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))


def left(folder: Path) -> str:
    """How much of its disk is left, in words."""
    disk = disk_of(folder)
    usage, files = shutil.disk_usage(disk), os.statvfs(disk)
    more = ", but no inode for another file" if files.f_files and not files.f_favail else ""
    return f"the disk at {disk} has {sizes.shown(usage.free)} of {sizes.shown(usage.total)} left{more}"


def disk_of(folder: Path) -> Path:
    """Where the file system of ``folder`` is mounted; the folder need not be there."""
    return next(path for path in (folder.resolve(), *folder.resolve().parents) if path.is_mount())


def sync(path: Path) -> None:
    """Have a file, or a folder with all that is in it, on the disk when this returns."""
    for part in (*(path.rglob("*") if path.is_dir() else ()), path):
        descriptor = os.open(part, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_for_all(path: Path, content: str) -> None:
    """Write a file as :func:`write_whole` does that all users may read, with its folder, whatever the umask.

    Who runs a command may be another user than those who parse DAGs, plan and train.

    :raises OSError: when it can't be written.
    """
    if not path.parent.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.parent.chmod(0o755)
    write_whole(path, content, 0o644)


def write_whole(path: Path, content: str | bytes, mode: int | None = None) -> None:
    """Write a file that is whole or as it was, whoever dies meanwhile, and on the disk when this returns.

    :param mode: of the file, where it is to be another than this process's umask makes it.
    :raises OSError: when it can't be written; what was there before stays.
    """
    # Other processes and nodes may write it, too.
    new = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    try:
        with open(new, "wb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
