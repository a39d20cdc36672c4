"""Who may look into what sweeps keep: the user of the workers alone, or a group that the settings name."""

from __future__ import annotations

import grp
import os
from pathlib import Path

from airflow.sdk import conf
from airflow.sdk.exceptions import AirflowFailException

_OWNER_ALONE, _GROUP_TOO = 0o700, 0o2770  # 2: what is made in a folder belongs to the folder's group


def close_to_others(home: Path) -> None:
    """Let only this user, or the group of ``[saturn] group``, into what sweeps keep.

    With a group, what this process and those it starts write is the group's too. What else is in ``home``,
    such as the files by which nodes announce themselves, is for all who parse DAGs.

    :param home: the folder of Saturn's state; one that another user made is left as it is.
    :raises AirflowFailException: when there is no such group, or another user has closed the folder.
    """
    name = conf.get("saturn", "group", fallback="")
    group = _number_of(name) if name else None
    if group is not None:
        os.umask(0o007)
    sweeps = home / "sweeps"
    try:
        sweeps.mkdir(parents=True, exist_ok=True)
        if group is not None:
            _close(home, group)
        _close(sweeps, group)
    except PermissionError:
        raise AirflowFailException(
            f"{sweeps} is closed to user {os.geteuid()}: let all workers run as one user, or name a group "
            "that all of their users are in, as [saturn] group"
        ) from None


def _close(folder: Path, group: int | None) -> None:
    found = folder.stat()
    if found.st_uid != os.geteuid():
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(folder)
        return
    if group is not None and found.st_gid != group:
        os.chown(folder, -1, group)
    mode = _OWNER_ALONE if group is None else _GROUP_TOO
    if found.st_mode & 0o7777 != mode:
        folder.chmod(mode)


def _number_of(name: str) -> int:
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise AirflowFailException(
            f"[saturn] group is {name!r}, and this machine has no such group; make it with groupadd"
        ) from None
