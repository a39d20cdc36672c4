"""What earlier sweeps have left for MLflow."""

from __future__ import annotations

from pathlib import Path

import pytest

from saturn_airflow import tracking
from saturn_airflow.operators import leftovers
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
