"""Sweeps that are ended before they could report: by somebody, and by their DAG's time limit."""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import dag, task

from saturn_airflow import Cluster, HParams, Job, Node, SaturnSweepOperator


def sweep() -> SaturnSweepOperator:
    """Two jobs that have to take turns."""
    return SaturnSweepOperator(
        task_id="sweep",
        jobs=[
            Job(
                name,
                "faulty:linear",
                "faulty:slow_points",
                "faulty:loss",
                hparams=HParams(batch_size=16, batches=80),
            )
            for name in ("a", "b")
        ],
        techniques=["single"],
        cluster=Cluster(Node("a", devices=1, kind="cpu")),
        checkpoint_every=1,
    )


@task
def use(result: dict) -> str:
    return result["best"]["job"]


@dag(schedule=None, tags=["test"])
def cancelled_sweep():
    use(sweep().output)


@dag(schedule=None, tags=["test"], dagrun_timeout=timedelta(seconds=1))
def timed_out_sweep():
    sweep()


cancelled_sweep()
timed_out_sweep()
