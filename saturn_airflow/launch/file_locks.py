"""Locks on files, which the kernel takes off whoever dies."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any


def wait_for_lock(file: IO[str] | int, give_up: Callable[[], bool], on_wait: Callable[[], object]) -> bool:
    """Lock an open file for this process alone.

    :param give_up: asked ten times a second; when it says True the wait ends.
    :param on_wait: called once where another process holds the lock.
    :returns: whether it is locked; False when ``give_up`` said so.
    """
    if try_lock(file):
        return True
    on_wait()
    while not give_up():
        time.sleep(0.1)
        if try_lock(file):
            return True
    return False


def is_locked(path: Path) -> bool:
    """Whether a process holds the file for itself alone; False where there is no such file."""
    try:
        with open(path) as file:
            return not try_lock(file, fcntl.LOCK_SH)
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def alone(path: Path) -> Iterator[bool]:
    """Hold the file at ``path``, which is made where it is missing; False where another process does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        yield try_lock(file)


def try_lock(file: IO[Any] | int, kind: int = fcntl.LOCK_EX) -> bool:
    """Lock an open file, for this process alone; False where another holds it."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
