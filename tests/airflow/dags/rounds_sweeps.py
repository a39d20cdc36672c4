"""The same jobs in one round and in several, one of them three times slower than its trial says."""

from __future__ import annotations

import os

from airflow.sdk import dag

from saturn_airflow import Cluster, HParams, Job, Node, SaturnSweepOperator
from saturn_airflow.model.rounds import Rounds
from saturn_airflow.model.selection import SuccessiveHalving


def job(name: str, lr: float = 0.05, epochs: int = 1, **data) -> Job:
    return Job(
        name,
        load_model="slow_later:linear",
        load_dataloader="slow_later:paced",
        load_eval_dataloader="slow_later:held_out",
        loss_function="slow_later:loss",
        hparams=HParams(
            batch_size=16, epochs=epochs, lr=lr, optimizer="torch.optim:SGD", precision="float64"
        ),
        data_args=data,
    )


def cluster(node: str) -> Cluster:
    return Cluster(Node(node, devices=2, kind="cpu"))


#: benchmarks/real_rounds.py asks for more.
SAMPLES = int(os.environ.get("SAMPLES", "3200"))
JOBS = [job("slow", samples=SAMPLES, later=0.016), *(job(f"even-{n}", samples=SAMPLES) for n in (1, 2))]
COMMON = {
    "techniques": ["single", "ddp"],
    "planning_seconds": 3.0,
    "checkpoint_every": 5.0,
}


@dag(schedule=None, tags=["test"])
def one_round():
    SaturnSweepOperator(task_id="sweep", jobs=JOBS, cluster=cluster("a"), **COMMON)


@dag(schedule=None, tags=["test"])
def five_rounds():
    SaturnSweepOperator(
        task_id="sweep", jobs=JOBS, cluster=cluster("a"), rounds=Rounds(most=5, share=0.4), **COMMON
    )


@dag(schedule=None, tags=["test"])
def halved():
    SaturnSweepOperator(
        task_id="sweep",
        jobs=[
            job(f"lr-{lr}", lr=lr, epochs=3, samples=480, later=0.002, first=0.002)
            for lr in (1e-5, 1e-4, 0.01, 0.1)
        ],
        cluster=cluster("b"),
        rounds=4,
        selection=SuccessiveHalving(),
        objective="mean-completion",
        **COMMON,
    )


one_round()
five_rounds()
halved()
