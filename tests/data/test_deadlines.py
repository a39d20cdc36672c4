"""What a deadline can be, and which moment it means."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from saturn_airflow.model.deadlines import Deadline
from saturn_airflow.model.errors import InvalidSweepError

PARIS = ZoneInfo("Europe/Paris")


def moment(deadline: object, *began: int) -> datetime:
    found = Deadline.of(deadline)
    start = datetime(*began, tzinfo=PARIS).timestamp()  # type: ignore[arg-type, misc]
    return datetime.fromtimestamp(found.moment(start, PARIS), PARIS).replace(tzinfo=None)


@pytest.mark.parametrize(
    ("deadline", "began", "expected"),
    [
        (timedelta(hours=6), (2026, 5, 4, 22, 0), datetime(2026, 5, 5, 4, 0)),
        ("06:00", (2026, 5, 4, 22, 0), datetime(2026, 5, 5, 6, 0)),
        ("6:00", (2026, 5, 5, 0, 30), datetime(2026, 5, 5, 6, 0)),
        ("06:00", (2026, 5, 5, 6, 0), datetime(2026, 5, 6, 6, 0)),
        # The night in which clocks go forward: 06:00 comes an hour sooner, a span of time does not.
        ("06:00", (2026, 3, 28, 22, 0), datetime(2026, 3, 29, 6, 0)),
        (timedelta(hours=8), (2026, 3, 28, 22, 0), datetime(2026, 3, 29, 7, 0)),
    ],
)
def test_the_moment_a_deadline_means(deadline: Any, began: Any, expected: Any) -> None:
    assert moment(deadline, *began) == expected


@pytest.mark.parametrize("value", [3600, "24:00", "6am", "06:60", timedelta(0), timedelta(hours=-1), True])
def test_what_is_no_deadline_is_refused_by_name(value: Any) -> None:
    with pytest.raises(InvalidSweepError, match="give the time a sweep may take, such as timedelta"):
        Deadline.of(value)
