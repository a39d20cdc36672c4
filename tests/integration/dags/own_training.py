"""Sweeps of jobs that bring their own training, in one round and in two."""

from __future__ import annotations

from airflow.sdk import dag

from saturn_airflow import HParams, Job, Rounds, SaturnSweepOperator

SECONDS = {"seconds": 0.03}


def of_trainer(name: str) -> Job:
    return Job(name, load_model="own_loops:trainer", model_args=SECONDS, trainer=True)


def of_lightning(name: str) -> Job:
    return Job(
        name,
        load_model="own_loops:Classifier",
        load_dataloader="own_loops:rows",
        load_eval_dataloader="own_loops:rows",
        data_args=SECONDS,
        own_step=True,
        hparams=HParams(epochs=4, batch_size=4),
    )


@dag(schedule=None)
def own_training() -> None:
    jobs = [of_trainer("trainer"), of_trainer("trainer-cleared"), of_lightning("module")]
    SaturnSweepOperator(
        task_id="sweep",
        jobs=[*jobs, of_lightning("module-cleared")],
        techniques=["single", "ddp"],
        checkpoint_every=1,
        planning_seconds=1,
    )


@dag(schedule=None)
def own_training_in_rounds() -> None:
    SaturnSweepOperator(
        task_id="sweep",
        jobs=[of_trainer("trainer"), of_lightning("module")],
        techniques=["single", "ddp"],
        checkpoint_every=1,
        planning_seconds=1,
        rounds=Rounds(most=2, share=0.4),
    )


own_training()
own_training_in_rounds()
