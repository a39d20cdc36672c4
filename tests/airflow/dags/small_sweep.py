"""The smallest sweeps: one job, one strategy."""

from __future__ import annotations

from airflow.sdk import dag

from saturn_airflow import Cluster, HParams, Job, Node, SaturnSweepOperator


def sweep(job, **hparams):
    SaturnSweepOperator(
        task_id="sweep",
        jobs=[
            Job(job, "faulty:linear", "faulty:points", "faulty:loss", hparams=HParams(batches=30, **hparams))
        ],
        techniques=["single"],
        cluster=Cluster(Node("a", devices=1, kind="cpu")),
    )


@dag(schedule=None, tags=["test"])
def small_sweep():
    sweep("small", batch_size=16)


@dag(schedule=None, tags=["test"])
def familiar_sweep():
    sweep("familiar", batch_size=32)


small_sweep()
familiar_sweep()
