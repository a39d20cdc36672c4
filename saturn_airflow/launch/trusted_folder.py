"""Opening folders in which no other user can put, move or remove what is relied on."""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

_OTHERS = stat.S_IWOTH
_GROUP = stat.S_IWGRP
#: What a folder that a group shares has: its group passes on, and only owners remove their files.
SHARED = stat.S_ISGID | stat.S_ISVTX | 0o770


class UntrustedFolderError(Exception):
    """Another user could tamper with a folder; the message says how and where."""


def open_folder(folder: Path) -> int:
    """Open a folder, which is made (0700) with its parents where it is missing.

    Every component of its path, as it is written and as it is resolved, must belong to root or this user, and
    be one in which others can't rename or remove what is not theirs. Its own mode is for the caller to judge.

    :returns: the open folder; entries are reached through it (``dir_fd``), and no path is looked up twice.
    :raises UntrustedFolderError: when another user could put another folder in its place.
    :raises OSError: when it can't be made or opened.
    """
    path = Path(os.path.abspath(folder))
    _check_parents(path)
    with umask(0o077):
        path.mkdir(parents=True, exist_ok=True)
    resolved = path.resolve(strict=True)
    _check_parents(resolved)
    opened = os.open(resolved, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    if (owner := os.fstat(opened).st_uid) not in _trusted():
        os.close(opened)
        raise UntrustedFolderError(f"{path} belongs to user {user_name(owner)}")
    return opened


def is_shared(mode: int) -> bool:
    """Whether a folder of this mode is one that a group shares, and nobody else."""
    return stat.S_IMODE(mode) & (SHARED | _OTHERS) == SHARED


def is_writable_by_others(facts: os.stat_result) -> bool:
    """Whether others than its owner and root can add to a folder and remove from it."""
    if facts.st_mode & _OTHERS:
        return True
    return bool(facts.st_mode & _GROUP) and not _has_only(facts.st_gid, facts.st_uid)


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    """Make files and folders without these bits for a while."""
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def user_name(uid: int) -> str:
    """A user's name, or the number where it has none here."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _check_parents(path: Path) -> None:
    for part in reversed(path.parents):
        try:
            facts = part.lstat()
        except FileNotFoundError:
            return
        if facts.st_uid not in _trusted():
            raise UntrustedFolderError(f"{part} belongs to user {user_name(facts.st_uid)}")
        if stat.S_ISLNK(facts.st_mode) or facts.st_mode & stat.S_ISVTX:
            continue
        if is_writable_by_others(facts):
            raise UntrustedFolderError(
                f"{part} has mode {stat.S_IMODE(facts.st_mode):04o}, in which others can rename what is in it"
            )


def _trusted() -> set[int]:
    # In a user namespace, such as Apptainer's, root's files belong to whom the root folder belongs to.
    return {0, os.geteuid(), os.stat("/").st_uid}


def _has_only(gid: int, uid: int) -> bool:
    """Whether a group is root's, or the private one that many systems give each user."""
    if gid == 0:
        return True
    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(uid)
    except KeyError:
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
