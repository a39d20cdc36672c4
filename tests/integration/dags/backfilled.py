"""A nightly sweep whose days gone by are run again."""

from __future__ import annotations

import pendulum
from airflow.sdk import dag

from saturn_airflow import HParams, Job, SaturnSweepOperator


def job(name: str, lr: float) -> Job:
    # Each day has its own data; their speed is the same.
    data = {"until": "backfilled-{{ ds }}"}
    hparams = HParams(batches=10, batch_size=8, lr=lr)
    return Job(
        name,
        "slow_jobs:linear",
        "slow_jobs:points",
        "slow_jobs:loss",
        data_args=data,
        neutral=["until"],
        hparams=hparams,
    )


@dag(schedule="@daily", start_date=pendulum.datetime(2026, 1, 1), catchup=False)
def backfilled() -> None:
    SaturnSweepOperator(
        task_id="sweep",
        jobs=[job("low", 0.01), job("high", 0.1)],
        techniques=["single"],
        register_as="backfilled",
        planning_seconds=1,
    )


backfilled()
