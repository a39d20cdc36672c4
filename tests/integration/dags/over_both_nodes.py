"""A sweep of four small jobs over both nodes, one device each."""

from __future__ import annotations

from airflow.sdk import dag

from saturn_airflow import Cluster, HParams, Job, Node, SaturnSweepOperator, grid

VIT = Job(
    "vit-lr{lr}-seed{seed}",
    load_model="shop.models:vit",
    load_dataloader="shop.data:digits",
    loss_function="shop.models:classification_loss",
    model_args={"hidden_size": 32},
    hparams=HParams(epochs=3, batch_size=64, optimizer="torch.optim:AdamW"),
)


@dag(schedule=None, catchup=False)
def over_both_nodes() -> None:
    SaturnSweepOperator(
        task_id="sweep",
        jobs=grid(VIT, lr=[1e-3, 3e-3], seed=[1, 2]),
        cluster=Cluster(Node("gpu-a", devices=2, kind="cpu"), Node("gpu-b", devices=2, kind="cpu")),
        techniques=["single", "ddp"],
    )


over_both_nodes()
