"""Runs of one DAG that want to measure the same jobs at once: one does, the others wait for its plan."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from saturn_airflow.operators import measuring
from saturn_airflow.operators.context import SweepContext


class Runs:
    """Airflow's answers: the state of each run's plan task."""

    def __init__(self) -> None:
        self.plans: dict[str, str | None] = {}

    def who_measures(self, run_id: str, *fingerprints: str) -> str | None:
        ti: Any = SimpleNamespace(dag_id="dag", get_task_states=self.states)
        sweep = SweepContext("dag", run_id, "sweep", Path("unused"))
        return measuring.who_measures({"ti": ti}, sweep, "sweep.plan", fingerprints)

    def states(self, *, dag_id: str, task_ids: list[str], run_ids: list[str]) -> dict[str, Any]:
        return {run: {task_ids[0]: self.plans[run]} for run in run_ids if run in self.plans}


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    monkeypatch.setattr(measuring, "home", lambda: tmp_path)
    return Runs()


def test_sixteen_runs_measure_once(runs: Runs) -> None:
    runs.plans = {f"day-{n}": None for n in range(16)}
    assert runs.who_measures("day-3", "a", "b") is None
    assert {runs.who_measures(run, "b", "c") for run in runs.plans if run != "day-3"} == {"day-3"}
    assert runs.who_measures("day-3", "a", "b") is None  # tried again
    runs.plans["day-3"] = "success"
    # Who has still something to measure, as where MLflow forgot it, is the next that the others wait for.
    assert runs.who_measures("day-5", "b") is None
    assert runs.who_measures("day-6", "b") == "day-5"


def test_other_jobs_are_not_waited_for(runs: Runs) -> None:
    runs.plans = {"monday": "running", "tuesday": None}
    assert runs.who_measures("monday", "of monday") is None
    assert runs.who_measures("tuesday", "of tuesday") is None


@pytest.mark.parametrize("state", ["success", "failed", "upstream_failed", "skipped", "removed", "deleted"])
def test_who_makes_no_plan_any_more_is_not_waited_for(runs: Runs, state: str) -> None:
    runs.plans = {"gone": None}
    assert runs.who_measures("gone", "a") is None
    assert runs.who_measures("other", "a") == "gone"
    runs.plans = {} if state == "deleted" else {"gone": state}
    assert runs.who_measures("other", "a") is None


def test_a_run_that_never_plans_is_not_waited_for(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.plans = {"paused": None}
    assert runs.who_measures("paused", "a") is None
    monkeypatch.setattr(measuring, "_LONGEST_SECONDS", -1.0)
    assert runs.who_measures("other", "a") is None


def test_a_note_that_its_writer_left_half_written_is_in_nobodys_way(runs: Runs, tmp_path: Path) -> None:
    runs.plans = {"killed": None}
    assert runs.who_measures("killed", "a") is None
    (note,) = tmp_path.glob("measuring/*/*/*.json")
    note.write_text("")
    assert runs.who_measures("other", "a") is None
    assert not note.exists()


def test_two_runs_that_were_cleared_do_not_wait_for_each_other(runs: Runs) -> None:
    runs.plans = {"monday": None, "tuesday": None}
    assert runs.who_measures("monday", "before") is None
    assert runs.who_measures("tuesday", "then") is None
    # Both are cleared, after their jobs were changed to the same ones.
    assert runs.who_measures("monday", "then") == "tuesday"
    assert runs.who_measures("tuesday", "before", "then") is None


def test_notes_of_runs_long_gone_do_not_pile_up(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for day in range(3):
        assert runs.who_measures(f"day-{day}", f"jobs of {day}") is None
    monkeypatch.setattr(measuring, "_LONGEST_SECONDS", -1.0)
    assert runs.who_measures("today", "a") is None
    assert [path.stem for path in tmp_path.glob("measuring/*/*/*.json")] == ["today"]
