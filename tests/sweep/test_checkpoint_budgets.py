"""The budgets of checkpoints as train tasks, the report and the doctor keep and tell them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from saturn_airflow import Cluster, InvalidSweepError, Node
from saturn_airflow.deployment.budgets import check_budgets
from saturn_airflow.deployment.findings import Deployment
from saturn_airflow.launch import checkpoint_budget
from saturn_airflow.model.settings import SweepSettings
from saturn_airflow.operators import checkpoint_budgets
from saturn_airflow.operators.checkpoint_budgets import CheckpointBudgets

SAVED = {"event": "checkpoint", "step": 1, "path": "..."}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AIRFLOW__SATURN__HOME", str(tmp_path))
    return tmp_path


def checkpoint(sweep: Path, training: str, status: str = "stopped") -> Path:
    """A checkpoint of 1 MB of the job ``a``, of which a run has ended so."""
    run = sweep / "a" / "runs" / "0001"
    run.mkdir(parents=True, exist_ok=True)
    (run / "alive").write_text("1")
    (run / "events.jsonl").write_text(json.dumps({"event": "end", "status": status, "time": 1.0}) + "\n")
    path = sweep / "a" / training / "checkpoints" / "step-00000001"
    path.mkdir(parents=True)
    (path / "1.safetensors").write_bytes(b"x" * 10**6)
    return path


def test_what_is_beyond_a_budget_goes_once_a_checkpoint_was_written(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__SATURN__CHECKPOINTS_BUDGET", "2 MB")
    mine, other = (home / "sweeps" / "dag" / run / "sweep" for run in ("1", "2"))
    live = [checkpoint(mine, ""), checkpoint(other, "")]
    aside = checkpoint(mine, "superseded-1")
    told, warned = list[str](), list[str]()
    budgets = CheckpointBudgets(mine, None, told.append, warned.append)
    budgets.hear({"event": "step"})
    assert aside.exists()
    budgets.hear(SAVED)
    assert not aside.exists()
    assert all(path.exists() for path in live)
    assert told == [f"Removed {aside}: [saturn] checkpoints_budget is 2.0 MB"]
    assert warned == []
    again = checkpoint(mine, "superseded-2")
    budgets.hear(SAVED)
    assert again.exists(), "it has just looked"
    budgets.keep(at_once=True)
    assert not again.exists()


def test_a_sweeps_own_budget_touches_no_other_and_what_may_not_go_is_told_once(home: Path) -> None:
    mine, other = (home / "sweeps" / "dag" / run / "sweep" for run in ("1", "2"))
    last, theirs = checkpoint(mine, ""), checkpoint(other, "superseded-1")
    warned = list[str]()
    budgets = CheckpointBudgets(mine, "10 kB", warned.append, warned.append)
    for _ in range(2):
        budgets.keep(at_once=True)
    assert last.exists()
    assert theirs.exists()
    (warning,) = warned
    assert "take 1.0 MB, and the sweep's checkpoints_budget is 10 kB: none of them may go" in warning


def test_who_finds_another_at_it_leaves_it_alone(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__SATURN__CHECKPOINTS_BUDGET", "1 MB")
    aside = checkpoint(home / "sweeps" / "dag" / "1" / "sweep", "superseded-1")
    with checkpoint_budget.alone(home) as alone:
        assert alone
        CheckpointBudgets(home, None, print, print).keep(at_once=True)
        assert aside.exists()


def test_a_budget_that_is_no_amount_is_refused_or_told_and_stops_no_training(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidSweepError, match="checkpoints_budget is 'much'; give an amount"):
        SweepSettings(cluster=Cluster(Node("a", 1)), checkpoints_budget="much")
    monkeypatch.setenv("AIRFLOW__SATURN__CHECKPOINTS_BUDGET", "0.5")
    warned = list[str]()
    CheckpointBudgets(home, None, print, warned.append).keep()
    assert "checkpoints_budget is '0.5'; give an amount such as '500 GB', not a part" in warned[0]
    (finding,) = check_budgets(Deployment())
    assert (finding.level, finding.text) == ("problem", warned[0])


def test_the_doctor_tells_of_checkpoints_beyond_their_budget_and_of_settings(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint(home / "sweeps" / "dag" / "1" / "sweep", "")
    assert [(f.level, f.text) for f in check_budgets(Deployment())] == [("ok", "checkpoints take 1.0 MB")]
    monkeypatch.setenv(f"AIRFLOW__SATURN__{checkpoint_budgets.SETTING.split()[1].upper()}", "1 kB")
    (finding,) = check_budgets(Deployment())
    assert finding.level == "warning"
    assert "checkpoints take 1.0 MB; [saturn] checkpoints_budget is 1 kB" in finding.text
    monkeypatch.setenv("AIRFLOW__SATURN__JOB_MEMORY", "plenty")
    assert next(iter(check_budgets(Deployment()))).level == "problem"
