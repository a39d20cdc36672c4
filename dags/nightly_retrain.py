"""Every night: train eight small models on two devices, and hand the best one on.

Everything here is real but small: GPT-2 models on the text of the files Python ships with, and ViT models
on scikit-learn's digits.
"""

from __future__ import annotations

from typing import Any

from airflow.sdk import Asset, dag, task

from saturn_airflow import Cluster, HParams, Job, Node, SaturnSweepOperator, grid

BEST_MODEL = Asset("nightly_best_model", uri="saturn://nightly_retrain/best_model")

GPT2 = Job(
    "gpt2-{n_layer}x{n_embd}-lr{lr}",
    load_model="shop.models:gpt2",
    load_dataloader="shop.data:python_text",
    load_eval_dataloader="shop.data:python_text_eval",
    loss_function="shop.models:lm_loss",
    model_args={"n_layer": 2, "n_embd": 64},
    data_args={"samples": 4096},
    hparams=HParams(epochs=1, batch_size=32, optimizer="torch.optim:AdamW"),
)
VIT = Job(
    "vit-{hidden_size}-lr{lr}",
    load_model="shop.models:vit",
    load_dataloader="shop.data:digits",
    load_eval_dataloader="shop.data:digits_eval",
    loss_function="shop.models:classification_loss",
    model_args={"hidden_size": 32},
    hparams=HParams(epochs=10, batch_size=64, optimizer="torch.optim:AdamW"),
)


@dag(schedule="@daily", catchup=False, max_active_runs=1, tags=["saturn"], doc_md=__doc__)
def nightly_retrain() -> None:
    """A sweep, and a task that uses its result."""
    sweep = SaturnSweepOperator(
        task_id="sweep",
        jobs=[
            *grid(GPT2, n_embd=[64, 128], lr=[1e-3, 3e-3]),
            *grid(VIT, hidden_size=[32, 64], lr=[1e-3, 3e-3]),
        ],
        # Without this line all techniques of the library are candidates, one's own among them.
        techniques=["single", "ddp", "fsdp", "pipeline"],
        cluster=Cluster(Node("local", devices=2, kind="cpu")),
        asset=BEST_MODEL,
    )

    @task
    def champions(result: dict[str, Any]) -> dict[str, str]:
        """The best model of each family; a real pipeline would promote them."""
        trained = [job for job in result["jobs"] if job["status"] == "finished"]
        winners = {}
        for family in ("gpt2", "vit"):
            own = [job for job in trained if job["job"].startswith(family)]
            if own:
                best = min(own, key=lambda job: job["eval_loss"])
                print(f"{best['job']} is the best {family}: eval_loss {best['eval_loss']:.4f}")
                winners[family] = best["model_uri"]
        return winners

    champions(sweep.output)


nightly_retrain()
