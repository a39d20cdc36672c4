"""What the training loop wants of those that evaluate and compare for it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from saturn_airflow.training.batches import GlobalBatch


class Evaluates(Protocol):
    """Goes through the evaluation data; every rank calls its methods together."""

    def run(self, limit: int | None = None) -> tuple[float, dict[str, float]]:
        """The mean loss over at most ``limit`` global batches, and the job's own metrics."""
        ...

    def few(self, samples: int) -> Evaluates:
        """The same over a batch of so many samples."""
        ...

    def seconds(self) -> float:
        """How long all of the data take."""
        ...


class SpotChecks(Protocol):
    """Compares the technique with one device while it trains; every rank calls its methods together."""

    def before(self, batch: GlobalBatch, *, last: bool) -> float:
        """Check the step on ``batch``, if it is its turn or the ``last``; the seconds that took."""
        ...

    def around(self) -> AbstractContextManager[None]:
        """Around the step that :meth:`before` was asked about."""
        ...

    def at_a_stop(self, batch: GlobalBatch) -> None:
        """Check where training is told to stop, after the step on ``batch``."""
        ...
