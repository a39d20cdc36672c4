"""Processes of this machine that a signal holds up (SIGSTOP): they are there, and do nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

#: Seconds between two looks, and between two beyond which who looks was held up, too.
_LOOK_SECONDS, _ASLEEP_SECONDS = 1.0, 10.0
#: Who is held up for less is not spoken of.
_TOLD_AFTER_SECONDS = 5.0


def is_held_up(pid: int) -> bool:
    """Whether a signal holds a process up; one that a debugger has stopped is not meant."""
    return _stat(pid)[0] == "T"


def parent_of(pid: int) -> int:
    """The process above another one; 0 where that is gone."""
    return int(_stat(pid)[1])


def _stat(pid: int) -> list[str]:
    """Its state, the process above it and what else proc(5) has of it."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return ["", "0"]


class Standstill:
    """Watches whether a process is held up, from now on.

    :param pid: its id; None where it is gone, or runs on another machine.
    """

    def __init__(self, pid: Callable[[], int | None]) -> None:
        self._pid = pid
        self._looked_at = self._moved_at = time.monotonic()
        self._told = False

    @property
    def seconds(self) -> float:
        """For how long it has been held up, as far as was seen."""
        return self._looked_at - self._moved_at

    def look(self) -> str | None:
        """Look, at most once a second.

        :returns: once each time that it is held up, a sentence for people; else None.
        """
        now = time.monotonic()
        if now - self._looked_at < _LOOK_SECONDS:
            return None
        awake, self._looked_at = now - self._looked_at < _ASLEEP_SECONDS, now
        pid = self._pid()
        if not awake or pid is None or not is_held_up(pid):
            self._moved_at, self._told = now, False
        if pid is None or self._told or self.seconds < _TOLD_AFTER_SECONDS:
            return None
        self._told = True
        return f"process {pid} is held up by a signal (SIGSTOP); kill -CONT {pid} lets it go on"
