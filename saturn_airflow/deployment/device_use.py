"""Who holds and who waits for the devices of this machine, and who else is on them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from saturn_airflow.launch import devices, leases
from saturn_airflow.launch.holders import Holder


def device_use(folder: Path | None) -> dict[str, Any]:
    """Devices and waiters of this machine.

    :param folder: of the device locks; None for the default.
    :returns: ``devices`` (name, id of a GPU on this machine, kind, holder, strangers: ids of processes on it
        that are not its holder's), ``waiters``, and ``ignored``: what is in the folder and is no lease; times
        are seconds since the epoch.
    """
    held, processes = leases.holders(folder), devices.gpu_processes()
    gpus = devices.gpus()
    names = [*gpus, *(name for name in leases.names(folder) if name not in gpus)]
    return {
        "folder": str(folder or leases.default_folder()),
        "devices": [
            {
                "name": name,
                "id": list(gpus).index(name) if name in gpus else None,
                "kind": gpus.get(name, "cpu"),
                "holder": _as_dict(held.get(name)),
                "strangers": strangers(processes.get(name, []), held.get(name)),
            }
            for name in names
        ],
        "waiters": [_as_dict(holder) for holder in leases.waiters(folder)],
        "ignored": leases.ignored(folder),
    }


def strangers(processes: Sequence[int], holder: Holder | None) -> list[int]:
    """Those of ``processes`` that do not belong to the session of the supervisor that holds the device."""
    ours = _session(holder.pid) if holder is not None else None
    return [pid for pid in processes if ours is None or _session(pid) != ours]


def _as_dict(holder: Holder | None) -> dict[str, Any] | None:
    return None if holder is None else {"who": holder.who, "pid": holder.pid, "since": holder.since}


def _session(pid: int) -> int | None:
    """The id of a process's session; all that a supervisor starts stays in the supervisor's."""
    try:
        return os.getsid(pid)
    except OSError:  # it is gone, or in another container
        return None
