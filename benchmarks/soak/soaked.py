"""The DAGs of benchmarks/soak.py: a sweep of small jobs, one that goes first, and one that gives way."""

from __future__ import annotations

import os
from typing import Any

from airflow.sdk import dag

from saturn_airflow import HParams, Job, SaturnSweepOperator

TECHNIQUES = {"a": "single", "b": "single", "c": "single", "d": "ddp"}
JOBS = [
    Job(
        f"{letter}-{technique}",
        load_model="soak_jobs:linear",
        load_dataloader="soak_jobs:points",
        loss_function="soak_jobs:loss",
        techniques=[technique],
        hparams=HParams(
            batches=int(os.environ.get("SOAK_BATCHES", "300")),
            batch_size=8,
            lr=0.01,
            lr_scheduler="torch.optim.lr_scheduler:CosineAnnealingLR",
            lr_scheduler_args={"T_max": 100},
            seed=number,
        ),
    )
    for number, (letter, technique) in enumerate(TECHNIQUES.items())
]


def sweep(**more: Any) -> None:
    """The sweep of each of the DAGs below."""
    SaturnSweepOperator(
        task_id="sweep",
        jobs=JOBS,
        checkpoint_every=2,
        planning_seconds=1,
        retries=5,
        allowed_failures=0,
        **more,
    )


@dag(schedule=None, catchup=False)
def soaked() -> None:
    """Sweeps of it overlap."""
    sweep()


@dag(schedule=None, catchup=False)
def soaked_urgent() -> None:
    """It goes before the others."""
    sweep(priority=10)


@dag(schedule=None, catchup=False)
def soaked_patient() -> None:
    """Its jobs give way at a checkpoint."""
    sweep(preempt=True)


soaked()
soaked_urgent()
soaked_patient()
