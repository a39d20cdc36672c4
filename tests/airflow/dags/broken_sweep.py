"""A sweep in which some jobs go wrong and the others must not notice; and a deadline no plan can meet."""

from __future__ import annotations

import dataclasses
from datetime import timedelta

from airflow.sdk import TriggerRule, dag, task

from saturn_airflow import Cluster, HParams, Job, Node, SaturnSweepOperator

TINY = HParams(optimizer="faulty:AdamW", batch_size=16, batches=60, lr=0.05)


def job(name, **fields):
    usual = {
        "load_model": "faulty:linear",
        "load_dataloader": "faulty:points",
        "loss_function": "faulty:loss",
        "hparams": TINY,
        "techniques": ["single"],
    }
    return Job(name, **{**usual, **fields})


@dag(schedule=None, tags=["test"])
def broken_sweep():
    sweep = SaturnSweepOperator(
        task_id="sweep",
        jobs=[
            job("misspelt", hparams=dataclasses.replace(TINY, optimizer_args={"weight_decai": 0.1})),
            job("far", hparams=dataclasses.replace(TINY, lr=1e38)),
            job("good"),
            job("good <script>"),
            job("not-a-number", load_dataloader="faulty:slow_points", loss_function="faulty:diverging_loss"),
            job("no-model", load_model="faulty:missing_weights"),
            job("bad-sample", load_dataloader="faulty:poisoned_points", hparams=HParams(batch_size=16)),
            job("fits-nowhere", techniques=["ddp"], nodes=["a"], model_args={"inputs": 4}),
        ],
        techniques=["single", "ddp"],
        cluster=Cluster(Node("a", devices=1, kind="cpu"), Node("b", devices=2, kind="cpu")),
        retries=0,
        objective="device-time",
        deadline=timedelta(seconds=1),
    )

    @task(trigger_rule=TriggerRule.ALL_DONE)
    def use(result):
        return result["missing"]

    use(sweep.output)


broken_sweep()
