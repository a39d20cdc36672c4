"""When a round ends: the policies a sweep's ``rounds=`` can name. Plain data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta

from saturn_airflow.model.arguments import checked
from saturn_airflow.model.errors import InvalidSweepError

#: A round that is shorter than this costs more than it can win: jobs that move are loaded anew.
LEAST_MINUTES = 1.0
#: Each round is tasks in the DAG, whether it is used or not.
MOST_ROUNDS = 100
#: Of what its plan has left, how much a round runs before the next plan. Chosen by ``benchmarks/rounds.py``.
DEFAULT_SHARE = 0.4


@checked("rounds", max_rounds="most")
@dataclass(frozen=True, kw_only=True)
class Rounds:
    """How many rounds a sweep may have, and when a round that is not the last ends.

    At the most one of the others is given. Without any, a round ends after 2/5 of what its plan takes: with
    four rounds, after about 40%, 64% and 78% of the whole.

    :param most: how many rounds there are at the most, also ``max_rounds``; those that are not needed are
        skipped.
    :param every_minutes: a round ends after so many minutes, or a ``timedelta``.
    :param share: a round ends after this share of its plan's makespan.
    :param off_by: a round ends when a job is going to end earlier or later than planned by more than this
        share of its plan's makespan; or, on several nodes, when other sweeps have come or ended, and what
        waits would be done earlier elsewhere by more than that.
    :raises InvalidSweepError: for a policy that can't be meant.
    """

    most: int = 4
    every_minutes: float | timedelta | None = None
    share: float | None = None
    off_by: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.most, bool) or not isinstance(self.most, int) or self.most < 1:
            raise InvalidSweepError(
                f"rounds: there are {self.most!r} at the most; give at least 1, which plans once"
            )
        if self.most > MOST_ROUNDS:
            raise InvalidSweepError(
                f"rounds: {self.most} are too many: each is a plan and its tasks in the DAG; "
                f"give at most {MOST_ROUNDS}"
            )
        if isinstance(self.every_minutes, timedelta):
            object.__setattr__(self, "every_minutes", self.every_minutes / timedelta(minutes=1))
        given = [name for name in ("every_minutes", "share", "off_by") if getattr(self, name) is not None]
        if len(given) > 1:
            raise InvalidSweepError(f"rounds: give {given[0]} or {given[1]}, not both")
        for name in given:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise InvalidSweepError(f"rounds: {name} is {value!r}; give a number")
        if isinstance(self.every_minutes, int | float) and self.every_minutes < LEAST_MINUTES:
            raise InvalidSweepError(
                f"rounds: every_minutes is {self.every_minutes:g}; moving a job takes most of a minute by "
                f"itself, so give at least {LEAST_MINUTES:g}"
            )
        if self.share is not None and not 0.05 <= self.share <= 0.95:
            raise InvalidSweepError(
                f"rounds: share is {self.share:g}; give the share of a plan after which to look at it again, "
                "from 0.05 to 0.95"
            )
        if self.off_by is not None and not 0.01 <= self.off_by < math.inf:
            raise InvalidSweepError(
                f"rounds: off_by is {self.off_by:g}; nothing runs to plan within less than 0.01 (one per "
                "cent), so every round would end at once; give at least that"
            )

    @classmethod
    def of(cls, value: object) -> Rounds:
        """What a user gave as ``rounds=``: a number, or a policy.

        :raises InvalidSweepError: for anything else.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, int) and not isinstance(value, bool):
            return cls(most=value)
        raise InvalidSweepError(
            f"rounds is {value!r}; give a number, or a policy such as Rounds(most=4, every_minutes=30)"
        )

    @property
    def says_when(self) -> bool:
        """Whether it says itself when a round ends; where it does not, the rungs of a selection may."""
        return (self.every_minutes, self.share, self.off_by) != (None, None, None)

    def length(self, makespan: float) -> float:
        """Seconds after which a round ends whose plan takes ``makespan`` seconds; infinite where only a job
        that strays ends it."""
        if isinstance(self.every_minutes, int | float):
            return self.every_minutes * 60
        if self.off_by is not None:
            return math.inf
        return makespan * (DEFAULT_SHARE if self.share is None else self.share)

    def strayed(self, expected: float, planned: float, makespan: float) -> bool:
        """Whether a job that is expected to end ``expected`` seconds from its plan's start instead of
        ``planned`` ends the round."""
        return self.off_by is not None and abs(expected - planned) > self.off_by * makespan
