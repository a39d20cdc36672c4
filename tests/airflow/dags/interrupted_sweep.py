"""A sweep of one job that is slow enough to be interrupted."""

from __future__ import annotations

from airflow.sdk import dag

from saturn_airflow import Cluster, HParams, Job, Node, SaturnSweepOperator


@dag(schedule=None, tags=["test"])
def interrupted_sweep():
    SaturnSweepOperator(
        task_id="sweep",
        jobs=[
            Job(
                "long",
                "faulty:linear",
                "faulty:slow_points",
                "faulty:loss",
                hparams=HParams(batch_size=16, batches=120),
            )
        ],
        techniques=["single"],
        cluster=Cluster(Node("a", devices=1, kind="cpu")),
        checkpoint_every=1,
    )


interrupted_sweep()
