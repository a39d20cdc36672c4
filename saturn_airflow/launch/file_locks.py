"""Locks on files, which the kernel takes off whoever dies."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO


def wait_for_lock(file: IO[str] | int, give_up: Callable[[], bool], on_wait: Callable[[], object]) -> bool:
    """Lock an open file for this process alone.

    :param give_up: asked ten times a second; when it says True the wait ends.
    :param on_wait: called once where another process holds the lock.
    :returns: whether it is locked; False when ``give_up`` said so.
    """
    told = False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if not told:
                on_wait()
                told = True
            if give_up():
                return False
            time.sleep(0.1)


def is_locked(path: Path) -> bool:
    """Whether a process holds the file for itself alone; False where there is no such file."""
    try:
        with open(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
