"""A sweep whose jobs take secrets: as arguments, and by asking Airflow for a connection."""

from __future__ import annotations

from airflow.sdk import dag

from saturn_airflow import Cluster, HParams, Job, Node, SaturnSweepOperator, Secret


@dag(schedule=None, tags=["test"])
def secret_sweep():
    made = [
        Job(
            name,
            f"secret_takers:{function}",
            "secret_takers:points",
            "faulty:loss",
            HParams(batches=20, batch_size=16),
            model_args={"password": Secret("shop_db", "password"), "token": Secret("shop_db", "api_token")},
            data_args={"database": {"password": Secret("shop_db", "password"), "name": "shop"}},
            connections=["shop_db"],
        )
        for name, function in (("reads", "model"), ("can-not-log-in", "fails"))
    ]
    SaturnSweepOperator(
        task_id="sweep",
        jobs=made,
        techniques=["single"],
        allowed_failures=1,
        cluster=Cluster(Node("a", devices=1, kind="cpu")),
    )


secret_sweep()
