"""Waves of trials that are not needed: all of them are skipped at once, and nothing else is."""

from __future__ import annotations

from typing import Any

import pytest
from airflow.sdk import DAG
from any_job import ANY_JOB

from saturn_airflow import Cluster, Node, SaturnSweepOperator
from saturn_airflow.model.settings import SweepSettings
from saturn_airflow.operators import wave_tasks
from saturn_airflow.operators.wave_tasks import NextWaveOperator, WaveOperator

ONE = Cluster(Node("local", devices=2, kind="cpu"))
TWO = Cluster(Node("gpu-a", devices=8), Node("gpu-b", devices=8))


def skipped_behind(
    task_id: str, trials: list[dict[str, Any]], cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """What Airflow is told to skip once a task has listed these trials."""
    told: list[str] = []
    monkeypatch.setattr(wave_tasks, "skip_tasks", told.extend)
    with DAG("nightly", schedule=None) as dag:
        SaturnSweepOperator(task_id="sweep", jobs=[ANY_JOB], cluster=cluster)
        SaturnSweepOperator(task_id="sweep_2", jobs=[ANY_JOB], cluster=cluster)
    task: Any = dag.get_task(task_id)
    assert isinstance(task, WaveOperator)
    monkeypatch.setattr(type(task), "list_trials", lambda self, context: trials)
    context: Any = {"task": task}
    assert task.execute(context) == trials
    for callback in task.on_success_callback:
        callback(context)
    return told


def test_without_trials_every_wave_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    choices, waves = [f"choose_{n}" for n in (2, 3, 4)], [f"wave_{n}" for n in (1, 2, 3, 4)]
    expected = [f"sweep.profile.{name}" for name in (*choices, *waves)]
    assert skipped_behind("sweep.trials", [], ONE, monkeypatch) == expected


def test_what_hands_out_the_trials_of_nodes_is_skipped_with_its_wave(monkeypatch: pytest.MonkeyPatch) -> None:
    told = skipped_behind("sweep.profile.choose_4", [], TWO, monkeypatch)
    nodes = [name for node in ("gpu-a", "gpu-b") for name in (node, f"{node}_trials")]
    assert told == [f"sweep.profile.wave_4.{name}" for name in nodes]


def test_waves_with_trials_and_those_behind_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    assert skipped_behind("sweep.trials", [{"node": "local"}], ONE, monkeypatch) == []


def test_where_airflow_does_not_answer_its_scheduler_skips_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def away(tasks: list[str]) -> None:
        raise RuntimeError("the API server is away")

    monkeypatch.setattr(wave_tasks, "skip_tasks", away)
    settings = SweepSettings(cluster=ONE, group="sweep")
    task: Any = NextWaveOperator(
        task_id="choose_2", settings=settings, profile_tasks=[], last=False, on_success_callback=print
    )
    task.lists_trials = False
    own, theirs = task.on_success_callback
    own({"task": task})
    assert theirs is print
