"""The nightly sweep on two nodes, each with its own Celery worker and two devices.

`make cluster-demo` runs it on the services of docker/compose.yaml.
"""

from __future__ import annotations

from airflow.sdk import dag

from saturn_airflow import Cluster, HParams, Job, Node, SaturnSweepOperator, grid

GPT2 = Job(
    "gpt2-{n_embd}-lr{lr}",
    load_model="shop.models:gpt2",
    load_dataloader="shop.data:python_text",
    load_eval_dataloader="shop.data:python_text_eval",
    loss_function="shop.models:lm_loss",
    model_args={"n_layer": 2, "n_embd": 64},
    data_args={"samples": 2048},
    hparams=HParams(epochs=1, batch_size=32, optimizer="torch.optim:AdamW"),
)
VIT = Job(
    "vit-lr{lr}",
    load_model="shop.models:vit",
    load_dataloader="shop.data:digits",
    load_eval_dataloader="shop.data:digits_eval",
    loss_function="shop.models:classification_loss",
    model_args={"hidden_size": 32},
    hparams=HParams(epochs=5, batch_size=64, optimizer="torch.optim:AdamW"),
)


@dag(schedule="@daily", catchup=False, max_active_runs=1, tags=["saturn"], doc_md=__doc__)
def nightly_on_cluster() -> None:
    """One sweep over both nodes."""
    SaturnSweepOperator(
        task_id="sweep",
        jobs=[
            *grid(GPT2, n_embd=[64, 128], lr=[1e-3, 3e-3]),
            *grid(VIT, lr=[1e-3, 3e-3]),
        ],
        # Without this line all techniques of the library are candidates, one's own among them.
        techniques=["single", "ddp", "fsdp"],
        cluster=Cluster(Node("gpu-a", devices=2, kind="cpu"), Node("gpu-b", devices=2, kind="cpu")),
    )


nightly_on_cluster()
