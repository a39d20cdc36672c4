"""The DAG of benchmarks/xcoms.py: a sweep of many jobs of one step each."""

from __future__ import annotations

import os

from airflow.sdk import dag

from saturn_airflow import Cluster, HParams, Job, Node, SaturnSweepOperator

JOBS = [
    Job(
        f"job-{number}",
        load_model="many_jobs:linear",
        load_dataloader="many_jobs:points",
        loss_function="many_jobs:loss",
        techniques=["single"],
        hparams=HParams(batches=1, batch_size=8, lr=0.01, seed=number),
    )
    for number in range(int(os.environ.get("MANY_JOBS", "10")))
]


@dag(schedule=None, catchup=False)
def many() -> None:
    """On one node: several would need workers."""
    SaturnSweepOperator(
        task_id="sweep",
        jobs=JOBS,
        cluster=Cluster(Node("here", devices=8, kind="cpu")),
        planning_seconds=10,
        allowed_failures=len(JOBS),
    )


sweep = many()
