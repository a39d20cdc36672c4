"""When a run starts killed processes again: as long as it gets on."""

from __future__ import annotations

from pathlib import Path

from saturn_airflow.launch.failures import Failure
from saturn_airflow.launch.restarts import MOST_WITHOUT_PROGRESS, Restarts
from saturn_airflow.model.status import Status

KILLED = Failure(status=Status.LOST, reason="rank 0 was killed by SIGKILL", signal="SIGKILL")


def starts(*checkpoints: int) -> int:
    """How often a run is started again that comes to one of these checkpoints each time, then to the last."""
    restarts, count = Restarts(), 0
    while restarts.allow(KILLED) and count < 50:
        restarts.note({"event": "checkpoint", "step": checkpoints[min(count, len(checkpoints) - 1)]})
        count += 1
    return count


def test_a_checkpoint_that_is_written_again_and_again_is_no_progress() -> None:
    assert starts(*range(100)) == 50
    assert starts(10) == MOST_WITHOUT_PROGRESS + 1
    assert starts(10, 20, 15, 20) == MOST_WITHOUT_PROGRESS + 2


def test_what_is_left_counts_from_the_checkpoint_that_is_there() -> None:
    restarts = Restarts()
    restarts.note({"event": "start", "step": 5})
    assert restarts.batches_left(100) == 100
    restarts.note({"event": "checkpoint", "step": 25})
    restarts.note({"event": "checkpoint", "step": 15})  # the other was damaged
    assert restarts.batches_left(100) == 90


def test_what_was_refused_is_left_again(tmp_path: Path) -> None:
    restarts = Restarts()
    restarts.note({"event": "start", "step": 0, "checkpoint": None})
    for step in (10, 20):
        restarts.note({"event": "checkpoint", "step": step, "path": str(tmp_path / str(step))})
    (tmp_path / "10").mkdir()  # the other was set aside
    restarts.note({"event": "refused"})
    assert restarts.batches_left(100) == 90
