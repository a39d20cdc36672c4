"""Retraining from last night's champion, each job under another technique."""

from __future__ import annotations

from airflow.sdk import dag

from saturn_airflow import HParams, Job, SaturnSweepOperator

TECHNIQUES = ("ddp", "fsdp", "pipeline", "spill")


def job(technique: str, lr: float) -> Job:
    """One that is trained, or, with a learning rate of 0, one that stays what it began with."""
    return Job(
        f"{technique}-{lr}",
        load_model="shop.models:vit",
        load_dataloader="shop.data:digits",
        load_eval_dataloader="shop.data:digits_eval",
        loss_function="shop.models:classification_loss",
        model_args={"hidden_size": 32},
        init_from="models:/warm_nights@champion",
        init_missing="scratch",
        hparams=HParams(epochs=1, batch_size=64, lr=lr),
        techniques=[technique],
    )


@dag(schedule=None)
def warm_nights() -> None:
    SaturnSweepOperator(
        task_id="sweep",
        jobs=[job(technique, lr) for technique in TECHNIQUES for lr in (0.0, 3e-3)],
        register_as="warm_nights",
        planning_seconds=1,
    )


warm_nights()
