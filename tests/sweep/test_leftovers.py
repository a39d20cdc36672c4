"""What earlier sweeps have left for MLflow."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from saturn_airflow import tracking
from saturn_airflow.operators import leftovers, pruning
from saturn_airflow.tracking.outbox import Outbox


def test_records_of_an_ended_sweep_do_not_wait_behind_one_that_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "home", lambda: tmp_path)
    trains, ended, told = (tmp_path / "sweeps" / "dag" / run / "sweep" for run in ("1", "2", "3"))
    for folder in (trains, ended):
        Outbox(folder / "job").append({"kind": "tags", "values": {"a": "b"}})
    told.mkdir(parents=True)
    asked: list[Path] = []

    def send(uri: str, folder: Path, patience: float) -> bool:
        asked.append(folder)
        return folder != trains  # another process sends those

    monkeypatch.setattr(tracking, "send_outbox", send)
    assert leftovers.send_unsent("sqlite://") == [trains, ended]
    assert asked == [trains, ended]
    monkeypatch.setattr(leftovers, "_SENDING_SECONDS", 0.0)
    assert leftovers.send_unsent("sqlite://") == [trains, ended], "estimates are looked for there, too"
    assert asked == [trains, ended], "a sweep has other things to do"


def test_a_sweep_whose_disk_does_not_answer_keeps_no_other_from_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sweep looks at all others as it begins and as it ends."""
    monkeypatch.setenv("AIRFLOW__SATURN__HOME", str(tmp_path))
    monkeypatch.setattr(leftovers, "PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(pruning, "PATIENCE_SECONDS", 0.2)
    hangs, answers = (tmp_path / "sweeps" / "dag" / run / "sweep" for run in ("1", "2"))
    waiting = threading.Event()

    def ask(folder: Path, *_: object) -> bool:
        return folder != hangs or waiting.wait(60)

    for folder in (hangs, answers):
        folder.mkdir(parents=True)
    monkeypatch.setattr(tracking, "has_unsent", ask)
    monkeypatch.setattr(tracking, "send_outbox", lambda *_, **__: True)
    monkeypatch.setattr(pruning, "_may_go", ask)
    began = time.monotonic()
    try:
        for _ in range(3):
            assert leftovers.send_unsent("sqlite://") == [answers]
        assert pruning.prune() == [answers]
        assert time.monotonic() < began + 20
        assert hangs.exists()
    finally:
        waiting.set()


def test_a_sweep_whose_folder_cant_be_read_keeps_no_other_from_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__SATURN__HOME", str(tmp_path))
    closed, other = (tmp_path / "sweeps" / "dag" / run / "sweep" for run in ("1", "2"))
    Outbox(other / "job").append({"kind": "tags", "values": {"a": "b"}})
    (closed / "mlflow").mkdir(parents=True)
    # Root reads what others may not, but no loop of links.
    (closed / "mlflow" / "outbox.jsonl").symlink_to("outbox.jsonl")
    monkeypatch.setattr(tracking, "send_outbox", lambda *_, **__: True)
    assert leftovers.send_unsent("sqlite://") == [other]
    assert pruning.prune(days=1) == []
