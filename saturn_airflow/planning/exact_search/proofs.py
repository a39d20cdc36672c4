"""Exact proofs as part of a solve, a slice of time at a time: top-down and bottom-up.

Both ask :mod:`saturn_airflow.planning.exact_search.sharings` for a schedule that ends by some C. Just below
the best makespan the answer is worth most, a better plan or the proof that there is none, and takes longest;
the nearer C is to the bound, the sooner it is refuted.
"""

from __future__ import annotations

from saturn_airflow.planning.clock import Clock
from saturn_airflow.planning.exact_search.node_packing import NotSettledError
from saturn_airflow.planning.exact_search.sharings import Attempt
from saturn_airflow.planning.incumbent import Incumbent

#: The first step above the bound, as a share of the difference of value and bound.
_FIRST_STEP = 1 / 8
#: Steps grow by this factor while answers take less than this share of the time left.
_LONGER = 2.0
_QUICK = 1 / 4


class Proof:
    """One question after another about ``best``, answered as time allows: does any schedule end by this C?"""

    def __init__(self, best: Incumbent) -> None:
        self.best = best
        self.attempt: Attempt | None = None

    @property
    def over(self) -> bool:
        """Whether there is nothing to go on with, unless a better schedule is found elsewhere."""
        if self.best.proven:
            return True
        attempt = self.attempt
        return attempt is not None and attempt.too_many and attempt.end <= self._highest

    def run(self, clock: Clock) -> bool:
        """Go on until a schedule or a bound is found, or the time is up; whether one was found."""
        self.attempt = attempt = self._ask()
        try:
            schedule = attempt.run(clock)
        except NotSettledError:
            return False
        if schedule is None:
            # No makespan is as small as this C; where they are whole seconds, the bound is rounded up.
            self.best.raise_bound(attempt.end)
        else:
            self.best.offer(schedule)
        return True

    def _ask(self) -> Attempt:
        """The attempt to go on with: the one that was cut short, or one for the next C."""
        raise NotImplementedError

    @property
    def _highest(self) -> float:
        return self.best.objective.just_below(self.best.instance, self.best.value)


class Descent(Proof):
    """Top-down: does any schedule end just earlier than the best? If none does, the best is optimal."""

    def _ask(self) -> Attempt:
        end = self._highest
        if self.attempt is None or self.attempt.too_many:
            return Attempt(self.best.instance, end)
        if end < self.attempt.end:
            self.attempt.lower(end)
        return self.attempt


class Climb(Proof):
    """Bottom-up: does any end a step above the bound? Steps grow as long as answers come quickly."""

    def __init__(self, best: Incumbent) -> None:
        super().__init__(best)
        self.step = _FIRST_STEP * (best.value - best.bound)
        self.spent = 0.0

    def run(self, clock: Clock) -> bool:
        """See :meth:`Proof.run`; the next step is longer where this answer was quick."""
        found = super().run(clock)
        self.spent += clock.elapsed
        if found:
            self.step *= _LONGER if self.spent < _QUICK * self.best.clock.left else 1.0
            self.attempt, self.spent = None, 0.0
        return found

    def _ask(self) -> Attempt:
        if self.attempt is not None and self.attempt.end <= self._highest:
            return self.attempt
        return Attempt(self.best.instance, min(self.best.bound + self.step, self._highest))
