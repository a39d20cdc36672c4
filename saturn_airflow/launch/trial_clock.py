"""The clock of one measurement in a trial, which starts when the first batch is done."""

from __future__ import annotations

import time

# Loading a large model, preparing its memory and compiling it take minutes; how fast it trains is told soon
# after. So what comes before the first batch is done has this many times the time of what comes after.
_SET_UP_FACTOR = 5.0


class TrialClock:
    """Whether a measurement takes too long.

    :param seconds: what it may take once the first batch is done; None for all it wants.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._launched = time.monotonic()
        self._stepped_at: float | None = None

    @property
    def setting_up(self) -> bool:
        """Whether no batch is done yet, of a measurement that has a limit."""
        return self._seconds is not None and self._stepped_at is None

    def stepped(self) -> float:
        """A batch is done, or the measurement has ended.

        :returns: the first time the seconds since the launch, later 0.
        """
        if not self.setting_up:
            return 0.0
        self._stepped_at = time.monotonic()
        return self._stepped_at - self._launched

    def too_late(self) -> str | None:
        """Why the measurement has to end; None while it may go on."""
        if self._seconds is None:
            return None
        now = time.monotonic()
        if self._stepped_at is None:
            limit = _SET_UP_FACTOR * self._seconds
            late = now > self._launched + limit
            return f"its first batch was not done within {limit:.0f} s" if late else None
        if now > self._stepped_at + self._seconds:
            return f"not measured within {self._seconds:.0f} s"
        return None
