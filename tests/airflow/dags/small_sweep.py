"""The smallest sweep: one job, one strategy."""

from __future__ import annotations

from airflow.sdk import dag

from saturn_airflow import Cluster, HParams, Job, Node, SaturnSweepOperator


@dag(schedule=None, tags=["test"])
def small_sweep():
    SaturnSweepOperator(
        task_id="sweep",
        jobs=[
            Job(
                "small",
                "faulty:linear",
                "faulty:points",
                "faulty:loss",
                hparams=HParams(batch_size=16, batches=30),
            )
        ],
        techniques=["single"],
        cluster=Cluster(Node("a", devices=1, kind="cpu")),
    )


small_sweep()
