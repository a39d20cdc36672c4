"""The one clock of a solve: everything, imports and model building included, counts in the time limit."""

from __future__ import annotations

import time


class Clock:
    """Counts down from ``limit`` seconds.

    :param started: :func:`time.monotonic` of the moment the user began to wait; now, if not given.
    """

    def __init__(self, limit: float, started: float | None = None) -> None:
        self.started = time.monotonic() if started is None else started
        self.limit = limit

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    @property
    def left(self) -> float:
        """Seconds left, at least 0."""
        return max(0.0, self.limit - self.elapsed)

    @property
    def expired(self) -> bool:
        """Whether the time is up."""
        return self.elapsed >= self.limit

    def within(self, seconds: float) -> Clock:
        """A clock for a part of the work: ``seconds`` from now, but no longer than this one."""
        return Clock(min(seconds, self.left))
