"""The DAGs of benchmarks/two_sweeps.py and benchmarks/meetings.py."""

from __future__ import annotations

import os
from datetime import timedelta

from airflow.sdk import dag

from saturn_airflow import Cluster, HParams, Job, Node, Rounds, SaturnSweepOperator

PREEMPT = os.environ.get("TWO_SWEEPS_PREEMPT") == "1"


def jobs(count: int, batches: int, technique: str = "single") -> list[Job]:
    """Jobs of a tenth of a second a batch on one device."""
    return [
        Job(
            f"{batches}-batches-{number}",
            load_model="soak_jobs:linear",
            load_dataloader="soak_jobs:points",
            loss_function="soak_jobs:loss",
            techniques=[technique],
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


@dag(schedule=None, catchup=False)
def rounds() -> None:
    """On both nodes; what waits goes to the other one when somebody comes."""
    SaturnSweepOperator(
        task_id="sweep", jobs=jobs(6, 600), planning_seconds=1, rounds=Rounds(most=4, off_by=0.1)
    )


@dag(schedule=None, catchup=False)
def known() -> None:
    """It tells how fast a job like that of ``wide`` is, which need not be measured then."""
    SaturnSweepOperator(
        task_id="sweep",
        jobs=jobs(1, 20, "ddp"),
        cluster=Cluster(Node("gpu-a", devices=2, kind="cpu")),
        planning_seconds=1,
    )


@dag(schedule=None, catchup=False)
def wide() -> None:
    """It takes all of one node."""
    SaturnSweepOperator(
        task_id="sweep",
        jobs=jobs(1, 1800, "ddp"),
        cluster=Cluster(Node("gpu-a", devices=2, kind="cpu")),
        planning_seconds=1,
        priority=10,
    )


@dag(schedule=None, catchup=False)
def due() -> None:
    """It would be in time, alone."""
    SaturnSweepOperator(
        task_id="sweep",
        jobs=jobs(4, 450),
        cluster=Cluster(Node("gpu-b", devices=2, kind="cpu")),
        planning_seconds=1,
        objective="device-time",
        deadline=timedelta(seconds=170),
        on_missed_deadline="soak_jobs:told",
    )


@dag(schedule=None, catchup=False)
def breaking() -> None:
    """It goes first."""
    SaturnSweepOperator(
        task_id="sweep",
        jobs=jobs(2, 900),
        cluster=Cluster(Node("gpu-b", devices=2, kind="cpu")),
        planning_seconds=1,
        priority=10,
        train_args={"priority_weight": 10},
    )


research()
urgent()
rounds()
known()
wide()
due()
breaking()
