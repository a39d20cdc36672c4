"""Two sweeps in one DAG: one trains on until a file is there, in the other all goes wrong that may."""

from __future__ import annotations

from airflow.sdk import dag

from saturn_airflow import Cluster, HParams, Job, Node, SaturnSweepOperator


def job(name, **fields):
    usual = {
        "load_model": "faulty:linear",
        "load_dataloader": "faulty:points",
        "loss_function": "faulty:loss",
        "hparams": HParams(batch_size=16, lr=0.05),
    }
    return Job(name, **{**usual, **fields})


@dag(schedule=None, tags=["test"])
def watched_sweep():
    SaturnSweepOperator(
        task_id="steady",
        jobs=[job("gated", load_dataloader="gated:points"), job("<script>alert(1)</script>")],
        techniques=["single"],
        cluster=Cluster(Node("a", devices=2, kind="cpu")),
        planning_seconds=1,
    )
    SaturnSweepOperator(
        task_id="troubled",
        jobs=[
            job("good"),
            job("bad-sample", load_dataloader="faulty:poisoned_points"),
            job("no-model", load_model="faulty:missing_weights"),
        ],
        techniques=["single"],
        cluster=Cluster(Node("b", devices=2, kind="cpu")),
        planning_seconds=1,
        retries=0,
    )


watched_sweep()
