"""Whether this process may write to a folder of Saturn's, and in words who may."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from saturn_airflow.launch.trusted_folder import user_name
from saturn_airflow.model import disks
from saturn_airflow.model.errors import DiskError


def check_may_write(folder: Path) -> None:
    """Check that this user may make files in ``folder``, and make it where it is not there.

    :raises DiskError: when not; the message names the folder in the way, whose it is, and what to do.
    """
    if why := why_not(folder):
        raise DiskError(why)


def why_not(folder: Path) -> str:
    """Why this user may not make files in ``folder``, in words; empty where that is allowed."""
    # What lies in a folder that may not be looked into seems not to be there.
    place = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if os.access(place, os.W_OK | os.X_OK):
        return ""
    try:
        facts = place.stat()
        if os.statvfs(place).f_flag & os.ST_RDONLY:
            return str(disks.fault(folder, OSError(errno.EROFS, os.strerror(errno.EROFS))))
    except OSError as error:
        return f"{folder} can't be written ({error.strerror})"
    if not stat.S_ISDIR(facts.st_mode):
        return f"{folder} can't be written: {place} is no folder; remove it"
    me, owner, mode = user_name(os.geteuid()), user_name(facts.st_uid), stat.S_IMODE(facts.st_mode)
    return (
        f"{folder} can't be written by user {me}: {place} belongs to user {owner} and has mode {mode:04o}; "
        f"give it back to {me} (chown -R {me} {place}; chmod -R u+rwX {place}), or let all workers run as "
        "one user, or as users of one [saturn] group"
    )
