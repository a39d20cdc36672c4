"""A sweep in which some jobs go wrong and the others must not notice."""

from __future__ import annotations

from airflow.sdk import TriggerRule, dag, task

from saturn_airflow import Cluster, HParams, Job, Node, SaturnSweepOperator

TINY = HParams(batch_size=16, batches=60)


@dag(schedule=None, tags=["test"])
def broken_sweep():
    sweep = SaturnSweepOperator(
        task_id="sweep",
        jobs=[
            Job("good", "faulty:linear", "faulty:points", "faulty:loss", hparams=TINY),
            Job("good <script>", "faulty:linear", "faulty:points", "faulty:loss", hparams=TINY),
            Job("not-a-number", "faulty:linear", "faulty:points", "faulty:diverging_loss", hparams=TINY),
            Job("no-model", "faulty:missing_weights", "faulty:points", "faulty:loss", hparams=TINY),
            Job(
                "bad-sample",
                "faulty:linear",
                "faulty:poisoned_points",
                "faulty:loss",
                hparams=HParams(batch_size=16),
            ),
        ],
        techniques=["single"],
        cluster=Cluster(Node("a", devices=1, kind="cpu"), Node("b", devices=2, kind="cpu")),
        retries=0,
    )

    @task(trigger_rule=TriggerRule.ALL_DONE)
    def use(result):
        return result["missing"]

    use(sweep.output)


broken_sweep()
