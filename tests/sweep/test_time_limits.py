"""Time limits of a DAG's tasks, and of jobs; which errors of a train task are worth another try."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from airflow.sdk import DAG, RetryAction
from airflow.sdk.exceptions import AirflowException

from saturn_airflow import Cluster, Job, Node, SaturnSweepOperator
from saturn_airflow.model.entries import PlanEntry
from saturn_airflow.model.errors import InvalidSweepError

VERSION = {"version": "1"}
JOB = Job(
    "small",
    load_model="packaging.version:parse",
    load_dataloader="packaging.version:parse",
    model_args=VERSION,
    data_args=VERSION,
)
ENTRY = PlanEntry(
    job=JOB,
    technique="single",
    devices=1,
    node="local",
    device_ids=(0,),
    start=0.0,
    end=1.0,
    kind="cpu",
    fingerprint="f",
    attempt=1.0,
    position=0,
).to_dict()


def trains(rounds: int, **arguments: Any) -> list[Any]:
    """The train tasks of a sweep."""
    with DAG("d", schedule=None, default_args=arguments.pop("default_args", {})) as dag:
        cluster = Cluster(Node("local", 1, kind="cpu"))
        SaturnSweepOperator(task_id="sweep", jobs=[JOB], cluster=cluster, rounds=rounds, **arguments)
    return [task.unmap({"entry": ENTRY}) for task in dag.tasks if task.task_id.endswith(".train")]


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_jobs_time_counts_on_its_devices_however_it_was_given(rounds: int) -> None:
    hour, day = timedelta(hours=1), timedelta(days=1)
    for given, seconds in (
        ({}, None),
        ({"job_timeout": hour}, 3600.0),
        ({"default_args": {"execution_timeout": day}}, 86400.0),
        ({"default_args": {"execution_timeout": day}, "job_timeout": hour}, 3600.0),
    ):
        found = trains(rounds, **dict(given))
        assert [task.job_timeout for task in found] == [seconds] * rounds
        # Airflow would count the time that a task waits for its devices.
        assert [task.execution_timeout for task in found] == [None] * rounds


@pytest.mark.parametrize("value", [3600, timedelta(0), "1h"])
def test_a_time_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(InvalidSweepError, match=r"job_timeout is .* give a timedelta above 0"):
        trains(1, job_timeout=value)


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_train_task_is_tried_again_where_it_says_so_and_not_for_a_bug(rounds: int) -> None:
    for task in trains(rounds):
        for error, action in (
            (AirflowException("training goes on"), RetryAction.RETRY),
            (BrokenPipeError(), RetryAction.RETRY),
            (TypeError("a bug"), RetryAction.FAIL),
            (InvalidSweepError("the connection has no host"), RetryAction.FAIL),
        ):
            assert task.retry_policy.evaluate(error, 1, 10, None).action == action, error
