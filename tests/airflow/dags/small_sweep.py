"""The smallest sweeps: one job, one strategy."""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import dag, task
from airflow.sdk.exceptions import AirflowSkipException

from saturn_airflow import Cluster, HParams, Job, Node, SaturnSweepOperator


def sweep(job, data="faulty:points", aim=None, **hparams):
    return SaturnSweepOperator(
        task_id="sweep",
        jobs=[Job(job, "faulty:linear", data, "faulty:loss", hparams=HParams(batches=30, **hparams))],
        techniques=["single"],
        cluster=Cluster(Node("a", devices=1, kind="cpu")),
        **(aim or {}),
    )


@dag(schedule=None, tags=["test"])
def small_sweep():
    sweep("small", batch_size=16)


@dag(schedule=None, tags=["test"])
def familiar_sweep():
    # Data that decides the speed, so that training is as fast as its trial; and a batch size of its own,
    # since what other sweeps have measured is known, too.
    aim = {"objective": "device-time", "deadline": timedelta(hours=1)}
    sweep("familiar", "faulty:slow_points", aim, batch_size=12)


@dag(schedule=None, tags=["test"])
def skipped_sweep():
    @task
    def nothing_today():
        raise AirflowSkipException("no new data")

    nothing_today() >> sweep("skipped", batch_size=8)


@dag(schedule=None, tags=["test"])
def runtime_sweep():
    @task
    def jobs():
        hparams = HParams(batches=30, batch_size=32)
        made = Job(
            "day {{ ds }}",
            "faulty:linear",
            "faulty:points",
            "faulty:loss",
            hparams,
            data_args={"samples": 256},
        )
        return [made.to_dict()]

    SaturnSweepOperator(
        task_id="sweep",
        jobs=jobs(),
        techniques=["single"],
        cluster=Cluster(Node("c", devices=1, kind="cpu")),
    )


small_sweep()
familiar_sweep()
skipped_sweep()
runtime_sweep()
