"""A whole sweep of Trainers and LightningModules, whose tasks are cleared while they train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fault_watch import Watched

pytestmark = [pytest.mark.services, pytest.mark.ranks, pytest.mark.timeout(1800)]


def test_trainers_and_modules_that_are_cleared_go_on_as_if_they_had_not_been(
    cluster: Any, figure: Callable[[str], None]
) -> None:
    sweep = Watched(cluster, "own_training")
    for job in ("trainer-cleared", "module-cleared"):
        cluster.wait_until(lambda job=job: sweep.events(job, "checkpoint"), 800, sweep.states)
        cluster.airflow.clear(sweep.dag_id, sweep.run_id, sweep.task(job))
    assert cluster.wait(sweep.dag_id, sweep.run_id, 800) == "success", sweep.states()
    result = cluster.airflow.xcom(sweep.dag_id, sweep.run_id, "sweep.report")
    assert {job["status"] for job in result["jobs"]} == {"finished"}
    assert result["best"]["metric"] == "eval_loss"
    for name in ("trainer", "module"):
        cleared = f"{name}-cleared"
        began = [event["step"] for event in sweep.events(cleared, "start")]
        assert began[0] == 0
        assert began[-1] > 0, "it went on from a checkpoint"
        assert sweep.losses(cleared) == pytest.approx(sweep.losses(name), rel=1e-4)
        figure(f"{name}: cleared, and gone on from step {began[-1]} of {max(sweep.losses(name))}")
    values = {job["job"]: job["eval_loss"] for job in result["jobs"]}
    assert values["trainer-cleared"] == pytest.approx(values["trainer"], rel=1e-4)
    assert values["module-cleared"] == pytest.approx(values["module"], rel=1e-4)


def test_trainers_and_modules_train_in_rounds(cluster: Any) -> None:
    sweep = Watched(cluster, "own_training_in_rounds")
    assert cluster.wait(sweep.dag_id, sweep.run_id, 800) == "success", sweep.states()
    result = cluster.airflow.xcom(sweep.dag_id, sweep.run_id, "sweep.report")
    assert {job["job"]: job["status"] for job in result["jobs"]} == {
        "trainer": "finished",
        "module": "finished",
    }
    for job in ("trainer", "module"):
        assert sorted(sweep.losses(job)) == list(range(1, 161))
