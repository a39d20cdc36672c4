"""More sweeps at once than one node has slots for."""

from __future__ import annotations

from airflow.sdk import dag

from saturn_airflow import Cluster, HParams, Job, Node, SaturnSweepOperator

SWEEPS, JOBS = 3, 5


def job(name: str) -> Job:
    # Twelve seconds of training.
    hparams = HParams(batches=120, batch_size=8, lr=0.01)
    return Job(name, "slow_jobs:linear", "slow_jobs:points", "slow_jobs:loss", hparams=hparams)


@dag(schedule=None)
def crowd() -> None:
    for number in range(SWEEPS):
        SaturnSweepOperator(
            task_id=f"sweep_{number}",
            jobs=[job(f"job-{i}") for i in range(JOBS)],
            cluster=Cluster(Node("gpu-a", devices=2, kind="cpu")),
            techniques=["single"],
            planning_seconds=1,
        )


crowd()
