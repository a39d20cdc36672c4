"""When a run whose processes were killed starts them again by itself, from the last checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from saturn_airflow.launch.failures import Failure
from saturn_airflow.model.status import Status

#: How often in a row they are killed before they have come to another checkpoint; then the run has failed.
MOST_WITHOUT_PROGRESS = 3


class Restarts:
    """Counts how often processes were killed since the last checkpoint.

    Only what a signal ended is started again. What the job's own code raises is a matter of the job's
    retries, and a process that the kernel killed because memory ran out would meet the same end.
    """

    def __init__(self) -> None:
        self._since_checkpoint = 0
        self._first_step: int | None = None
        self._saved: list[tuple[int, str]] = []
        self._furthest = -1

    def note(self, event: Mapping[str, Any]) -> None:
        """Look at what training says: a checkpoint of a further step is progress."""
        if event["event"] == "checkpoint":
            step = event.get("step")
            if step is not None:
                self._saved.append((step, event.get("path", "")))
            # One that is written once more, since the one before was damaged, is none.
            if step is None or step > self._furthest:
                self._since_checkpoint, self._furthest = 0, step or self._furthest
        elif event["event"] == "start" and event.get("step") is not None:
            if self._first_step is None:
                self._first_step = event["step"]
            self._saved.append((event["step"], event.get("checkpoint") or ""))
        elif event["event"] == "refused":  # what it saved since it was last compared is set aside
            self._saved = [(step, path) for step, path in self._saved if not path or Path(path).exists()]

    def batches_left(self, batch_count: int | None) -> int | None:
        """Of the batches that the run is to train for, those that no checkpoint has yet."""
        if batch_count is None or self._first_step is None:
            return batch_count
        saved_step = self._saved[-1][0] if self._saved else 0
        return max(0, batch_count - (saved_step - self._first_step))

    def allow(self, failure: Failure) -> bool:
        """Whether to start again after ``failure``; counts it."""
        if failure.status != Status.LOST or not failure.signal:
            return False
        self._since_checkpoint += 1
        return self._since_checkpoint <= MOST_WITHOUT_PROGRESS

    def explain(self, failure: Failure) -> Failure:
        """``failure``, which ends the run, with how often it was tried."""
        if self._since_checkpoint <= MOST_WITHOUT_PROGRESS:
            return failure
        times = f"{MOST_WITHOUT_PROGRESS} times in a row before it came to another checkpoint"
        return replace(failure, reason=f"{failure.reason}; it was started again {times}")
