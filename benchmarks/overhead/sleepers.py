"""The DAG of benchmarks/overhead.py: jobs that sleep, over the deployment's nodes."""

from __future__ import annotations

import json
import os

from airflow.sdk import dag

from saturn_airflow import HParams, Job, SaturnSweepOperator


def nothing(**arguments: object) -> None:
    """What jobs refer to that load nothing."""


JOBS = [
    Job(
        name,
        load_model="sleepers:nothing",
        load_dataloader="sleepers:nothing",
        loss_function="sleepers:nothing",
        model_args={"seconds_per_batch": seconds},
        hparams=HParams(batches=batches),
    )
    for name, seconds, batches in json.loads(os.environ.get("SLEEPERS", "[]"))
]

if JOBS:

    @dag(schedule=None, catchup=False)
    def sleepers() -> None:
        SaturnSweepOperator(task_id="sweep", jobs=JOBS, techniques=["asleep"])

    sleepers()
