"""The DAGs of benchmarks/two_sweeps.py: a long sweep that may give way, and a short one."""

from __future__ import annotations

import os

from airflow.sdk import dag

from saturn_airflow import HParams, Job, SaturnSweepOperator

PREEMPT = os.environ.get("TWO_SWEEPS_PREEMPT") == "1"


def jobs(count: int, batches: int) -> list[Job]:
    """Jobs of a tenth of a second a batch, on one device each."""
    return [
        Job(
            f"{batches}-batches-{number}",
            load_model="soak_jobs:linear",
            load_dataloader="soak_jobs:points",
            loss_function="soak_jobs:loss",
            techniques=["single"],
            hparams=HParams(batches=batches, batch_size=8, lr=0.01, seed=number),
        )
        for number in range(count)
    ]


@dag(schedule=None, catchup=False)
def research() -> None:
    """It has all devices when the other comes."""
    SaturnSweepOperator(task_id="sweep", jobs=jobs(4, 1500), planning_seconds=1, preempt=PREEMPT)


@dag(schedule=None, catchup=False)
def urgent() -> None:
    """It comes in the middle."""
    SaturnSweepOperator(task_id="sweep", jobs=jobs(2, 100), planning_seconds=1, priority=10)


research()
urgent()
