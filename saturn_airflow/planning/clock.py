"""The one clock of a solve: everything, imports and model building included, counts in the time limit."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator


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
    def gone(self) -> float:
        """The share of the time that is gone, from 0 to 1; 1 where there was no time at all."""
        return min(1.0, self.elapsed / self.limit) if self.limit > 0 else 1.0

    @property
    def expired(self) -> bool:
        """Whether the time is up."""
        return self.elapsed >= self.limit

    def within(self, seconds: float) -> Clock:
        """A clock for a part of the work: ``seconds`` from now, but no longer than this one."""
        return Clock(min(seconds, self.left))


class LookClock(Clock):
    """A deterministic clock: it counts how often it is read, each time a thousandth of a second.

    A search by such a clock takes the same number of steps, and so finds the same plan, on any machine and
    under any load.

    :param looks: the count to go on with, where a part of the work has a clock of its own; from 0, if not
        given.
    """

    def __init__(self, limit: float, looks: Iterator[int] | None = None) -> None:
        self._looks = itertools.count() if looks is None else looks
        self.started = 0.0
        # Now: ``elapsed`` counts from ``started``, which is 0 until this line.
        self.started = self.elapsed
        self.limit = limit

    @property
    def elapsed(self) -> float:
        """Reads since the start, this one included, divided by 1000."""
        return next(self._looks) / 1000 - self.started

    def within(self, seconds: float) -> Clock:
        """A clock for a part of the work that goes on with the same count."""
        return LookClock(min(seconds, self.left), self._looks)
