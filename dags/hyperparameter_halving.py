"""Find good hyper-parameters without training every candidate to its end.

After the first pass over the data, the worse half of the jobs is dropped; after the second, the worse half of
the rest; what is left trains on. A dropped job is *skipped* in Airflow and `pruned` in MLflow, not failed.
"""

from __future__ import annotations

from airflow.sdk import dag

from saturn_airflow import Cluster, HParams, Job, Node, SaturnSweepOperator, SuccessiveHalving, grid


@dag(schedule=None, catchup=False, max_active_runs=1, tags=["saturn"], doc_md=__doc__)
def hyperparameter_halving() -> None:
    """Six candidates; two of them train to their end."""
    SaturnSweepOperator(
        task_id="sweep",
        jobs=grid(
            Job(
                "vit-lr{lr}-b{batch_size}",
                load_model="shop.models:vit",
                load_dataloader="shop.data:digits",
                load_eval_dataloader="shop.data:digits_eval",
                loss_function="shop.models:classification_loss",
                model_args={"hidden_size": 32},
                hparams=HParams(epochs=6),
            ),
            lr=[1e-4, 1e-3, 1e-2],
            batch_size=[32, 128],
        ),
        techniques=["single"],
        cluster=Cluster(Node("local", devices=2, kind="cpu")),
        rounds=3,
        selection=SuccessiveHalving("eval_loss", reduction=2),
    )


hyperparameter_halving()
