"""Every night the jobs start from last night's champion, and the best takes its place if it is better.

The first night there is no champion yet, so the jobs start from scratch.
"""

from __future__ import annotations

from airflow.sdk import dag

from saturn_airflow import Cluster, HParams, Job, Node, SaturnSweepOperator, grid


@dag(schedule="@daily", catchup=False, max_active_runs=1, tags=["saturn"], doc_md=__doc__)
def warm_start() -> None:
    """Two learning rates, from the same weights."""
    SaturnSweepOperator(
        task_id="sweep",
        jobs=grid(
            Job(
                "vit-lr{lr}",
                load_model="shop.models:vit",
                load_dataloader="shop.data:digits",
                load_eval_dataloader="shop.data:digits_eval",
                loss_function="shop.models:classification_loss",
                model_args={"hidden_size": 32},
                init_from="models:/digits_daily@champion",
                init_missing="scratch",
                hparams=HParams(epochs=2, batch_size=64),
            ),
            lr=[3e-4, 1e-3],
        ),
        techniques=["single"],
        cluster=Cluster(Node("local", devices=2, kind="cpu")),
        register_as="digits_daily",
    )


warm_start()
