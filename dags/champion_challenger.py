"""A sweep's best model becomes the challenger if it beats the champion, and the champion if a human agrees.

Airflow shows the question under the DAG run's *Required Actions*, and takes the answer from its API as well.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.sdk import dag, task

from saturn_airflow import Cluster, HParams, Job, Node, SaturnSweepOperator, grid


@dag(schedule="@weekly", catchup=False, max_active_runs=1, tags=["saturn"], doc_md=__doc__)
def champion_challenger() -> None:
    """Train, ask, promote."""
    sweep = SaturnSweepOperator(
        task_id="sweep",
        jobs=grid(
            Job(
                "vit-lr{lr}",
                load_model="shop.models:vit",
                load_dataloader="shop.data:digits",
                load_eval_dataloader="shop.data:digits_eval",
                loss_function="shop.models:classification_loss",
                metrics={"accuracy": "shop.metrics:accuracy"},
                model_args={"hidden_size": 32},
                hparams=HParams(epochs=2, batch_size=64),
            ),
            lr=[1e-3, 3e-3],
        ),
        techniques=["single"],
        cluster=Cluster(Node("local", devices=2, kind="cpu")),
        metric="accuracy",
        mode="max",
        register_as="digits@challenger",
    )

    @task.short_circuit
    def challenger(result: dict[str, Any]) -> dict[str, Any] | None:
        """What was registered; where nothing beats the champion, nobody is asked."""
        registered: dict[str, Any] = result["registered"]
        print(registered["reason"])
        return registered if registered["version"] else None

    approve = ApprovalOperator(
        task_id="approve",
        subject="Promote version {{ ti.xcom_pull('challenger')['version'] }} of digits?",
        body="{{ ti.xcom_pull('challenger')['reason'] }}",
        response_timeout=timedelta(days=3),
    )

    @task
    def promote(registered: dict[str, Any]) -> None:
        """Let the alias `champion`, which services load, name the new version."""
        from mlflow import MlflowClient

        from saturn_airflow.operators.context import mlflow_uri

        client = MlflowClient(mlflow_uri())
        client.set_registered_model_alias(registered["name"], "champion", registered["version"])

    registered = challenger(sweep.output)
    registered >> approve >> promote(registered)  # type: ignore[operator]


champion_challenger()
