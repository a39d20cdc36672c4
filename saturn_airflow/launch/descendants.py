"""The processes that a run leaves behind: workers of a rank that was killed, and what a job's code started.

Most are of the supervisor's process group. One that left it (``setsid``), as servers and daemons do, is found
as its descendant: the kernel gives the supervisor those whose parents have ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

_PR_SET_CHILD_SUBREAPER = 36
# What is sent SIGKILL is gone within milliseconds, unless the kernel holds it.
_SECONDS = 2.0
_LONGEST = 100  # characters of a command line, in a message


class _Process(NamedTuple):
    parent: int
    group: int


def adopt() -> None:
    """Be the parent of all that descends from this process and whose own parent ends."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap(own: Collection[int]) -> None:
    """Let those go that were adopted and have ended: each stands in the kernel's table until somebody asks.

    :param own: children of this process's own, which are waited for elsewhere.
    """
    own = {*own, *(child.pid or 0 for child in multiprocessing.active_children())}
    with contextlib.suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid in own:
                return
            os.waitpid(ended.si_pid, 0)


def end() -> None:
    """End all others of this process's group, and all that descend from it."""
    deadline = time.monotonic() + _SECONDS
    while (left := others()) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def others() -> set[int]:
    """The other processes of this process's group, and those that descend from it, that have not ended."""
    running = _running()
    group = {pid for pid, process in running.items() if process.group == os.getpgrp()}
    return (group | _descendants(running)) - {os.getpid()}


def apart() -> list[str]:
    """The command lines of those that descend from this process and have left its group."""
    running = _running()
    found = sorted(_descendants(running))
    return [_command(pid) for pid in found if running[pid].group != os.getpgrp()]


def _descendants(running: dict[int, _Process]) -> set[int]:
    found, more = set[int](), {os.getpid()}
    while more:
        more = {pid for pid, process in running.items() if process.parent in more} - found
        found |= more
    return found


def _running() -> dict[int, _Process]:
    """All processes that have not ended."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent, group = path.read_text().rpartition(")")[2].split()[:3]
            # Its files are open until its last thread has ended.
            ended = state in "ZX" and len(list(path.parent.glob("task/*"))) <= 1
            if not ended:
                found[int(path.parent.name)] = _Process(int(parent), int(group))
    return found


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        words = (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        )
        if words:
            return words if len(words) <= _LONGEST else f"{words[:_LONGEST]}..."
    return f"process {pid}"
