"""The jobs of benchmarks/sweep.py: small GPT-2 and ViT models in the order in which one would write them."""

from __future__ import annotations

import os

from saturn_airflow import Cluster, HParams, Job, Node, grid

NODE = Node("local", devices=2, kind="cpu")
CLUSTER = Cluster(NODE)
#: How many times as long all jobs are.
LONGER = int(os.environ.get("SWEEP_LONGER", "1"))

GPT2 = Job(
    "gpt2-{n_embd}-lr{lr}",
    load_model="shop.models:gpt2",
    load_dataloader="shop.data:python_text",
    load_eval_dataloader="shop.data:python_text_eval",
    loss_function="shop.models:lm_loss",
    model_args={"n_layer": 2, "n_embd": 64},
    data_args={"samples": 2048},
    hparams=HParams(epochs=LONGER, batch_size=32),
)
VIT = Job(
    "vit-{hidden_size}-lr{lr}",
    load_model="shop.models:vit",
    load_dataloader="shop.data:digits",
    load_eval_dataloader="shop.data:digits_eval",
    loss_function="shop.models:classification_loss",
    model_args={"hidden_size": 32},
    hparams=HParams(epochs=6 * LONGER, batch_size=64),
)
JOBS = [
    *grid(GPT2, n_embd=[64, 128, 192], lr=[1e-3, 3e-3]),
    *grid(VIT, hidden_size=[32, 64, 96], lr=[1e-3, 3e-3]),
]
