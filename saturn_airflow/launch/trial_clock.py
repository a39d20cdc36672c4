"""The clock of one measurement in a trial, which starts when the first batch is done."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from saturn_airflow.launch.failures import Failure
from saturn_airflow.model.estimates import HUNG_ALONE
from saturn_airflow.model.status import Status

# Loading a large model, preparing its memory and compiling it take minutes; how fast it trains is told soon
# after. So what comes before the first batch is done has this many times the time of what comes after.
_SET_UP_FACTOR = 5.0
# How many seconds a GiB of weights adds: before the first batch, where the guard may have to take its plain
# steps on the CPU since no device holds them, and after it, for batches that take as long as weights travel.
_SET_UP_SECONDS_A_GIB, _SECONDS_A_GIB = 40.0, 2.0


class TrialClock:
    """Whether a measurement takes too long.

    :param seconds: what it may take once the first batch is done; None for all it wants.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._launched = time.monotonic()
        self._stepped_at: float | None = None
        self._gib = 0.0
        #: The job's code that loads at the moment, in words; empty where none does.
        self.loading = ""
        self._plain = False

    @property
    def setting_up(self) -> bool:
        """Whether no batch is done yet, of a measurement that has a limit."""
        return self._seconds is not None and self._stepped_at is None

    def hears(self, event: Mapping[str, Any]) -> bool:
        """Take up what training says for the clock alone; whether ``event`` is that."""
        if event["event"] == "model_loaded":
            self.loaded(int(event.get("bytes", 0)))
        elif event["event"] == "loads":
            self.loading = str(event.get("what", ""))
        elif event["event"] == "plain_steps":
            self._plain = bool(event.get("taken"))
        return event["event"] in ("model_loaded", "loads", "plain_steps")

    def loaded(self, model_bytes: int) -> None:
        """The model is loaded, whose weights are of so many bytes: larger ones may take longer."""
        self.loading = ""
        self._gib = model_bytes / 2**30

    def stepped(self) -> float:
        """A batch is done, or the measurement has ended.

        :returns: the first time the seconds since the launch, and those that a large model may take on top
            of what any may; later 0.
        """
        if not self.setting_up:
            return 0.0
        self._stepped_at = time.monotonic()
        return self._stepped_at - self._launched + _SECONDS_A_GIB * self._gib

    def failure(self) -> Failure | None:
        """What the measurement ends with when it takes too long; None while it may go on."""
        reason = self.too_late()
        if reason is None:
            return None
        # What loads knows nothing of the technique, nor of the optimizer.
        loads = bool(self.loading)
        return Failure(status=Status.HUNG, reason=reason, whose="job" if loads else "", common=loads)

    def too_late(self) -> str | None:
        """Why the measurement has to end; None while it may go on."""
        if self._seconds is None:
            return None
        now = time.monotonic()
        if self._stepped_at is None:
            limit = _SET_UP_FACTOR * self._seconds + _SET_UP_SECONDS_A_GIB * self._gib
            late = now > self._launched + limit
            what = HUNG_ALONE if self._plain else "its first batch was not done"
            what = f"{self.loading} did not return" if self.loading else what
            return f"{what} within {limit:.0f} s" if late else None
        limit = self._seconds + _SECONDS_A_GIB * self._gib
        if now > self._stepped_at + limit:
            return f"not measured within {limit:.0f} s"
        return None
