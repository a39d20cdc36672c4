"""What ``deadline=`` of a sweep can be. Plain data."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo

from saturn_airflow.model.errors import InvalidSweepError

_CLOCK = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)")


@dataclass(frozen=True)
class Deadline:
    """When every job has to be done. One of the two is given.

    :param seconds: so many after the sweep began.
    :param clock: the first such time of day after the sweep began, as ``"06:00"``.
    """

    seconds: float | None = None
    clock: str | None = None

    @classmethod
    def of(cls, value: object) -> Deadline:
        """What a user gave as ``deadline=``.

        :raises InvalidSweepError: for anything but a positive timedelta or a time of day.
        """
        if isinstance(value, timedelta) and value > timedelta(0):
            return cls(seconds=value.total_seconds())
        if isinstance(value, str) and _CLOCK.fullmatch(value):
            return cls(clock=value)
        raise InvalidSweepError(
            f"deadline is {value!r}; give the time a sweep may take, such as timedelta(hours=6), "
            "or a time of day in the DAG's timezone, such as '06:00'"
        )

    def moment(self, began: float, timezone: tzinfo) -> float:
        """The deadline of a sweep that began at ``began``; both in seconds since the epoch."""
        if self.seconds is not None:
            return began + self.seconds
        assert self.clock is not None
        hour, minute = map(int, self.clock.split(":"))
        start = datetime.fromtimestamp(began, timezone)
        days = 0 if (start.hour, start.minute) < (hour, minute) else 1
        day = start.date() + timedelta(days=days)
        return datetime(day.year, day.month, day.day, hour, minute, tzinfo=timezone).timestamp()
