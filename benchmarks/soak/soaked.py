"""The DAG of benchmarks/soak.py: a sweep of small jobs over the deployment's nodes."""

from __future__ import annotations

import os

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


@dag(schedule=None, catchup=False)
def soaked() -> None:
    """Sweeps of it overlap."""
    SaturnSweepOperator(
        task_id="sweep", jobs=JOBS, checkpoint_every=2, planning_seconds=1, retries=5, allowed_failures=0
    )


soaked()
