"""A step of Saturn's loop beside one of a plain PyTorch loop, on one device: `python benchmarks/loop.py`.

The same model, data, loss and optimizer in one process, in turns: the median step of each turn, and the
median of the turns' ratios. The plain loop knows nothing of Saturn.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from machine import describe

from saturn_airflow import HParams, Job
from saturn_airflow.launch.request import TrainRequest
from saturn_airflow.training import ranks
from saturn_airflow.training.loop import train
from saturn_airflow.training.ranks import Ranks

DAGS = str(Path(__file__).resolve().parents[1] / "dags")
MODELS: dict[str, dict[str, Any]] = {
    "short": {"n_layer": 1, "n_embd": 32},
    "middle": {"n_layer": 2, "n_embd": 64},
    "long": {"n_layer": 4, "n_embd": 128},
}
AIM = 1.02
WARMUPS = 10


def job(model: dict[str, Any], steps: int) -> Job:
    return Job(
        "measured",
        load_model="shop.models:gpt2",
        load_dataloader="shop.data:python_text",
        loss_function="shop.models:lm_loss",
        model_args={**model, "n_head": 2},
        data_args={"samples": 4096},
        hparams=HParams(batch_size=8, batches=steps, lr=1e-3),
    )


def turns(model: dict[str, Any], steps: int, count: int, here: Ranks) -> list[tuple[float, float]]:
    """Median seconds of a plain step and of Saturn's, in so many turns."""
    sys.path.insert(0, DAGS)
    return [(plain(model, steps), saturn(model, steps, here)) for _ in range(count)]


def plain(model: dict[str, Any], steps: int) -> float:
    from shop.data import python_text
    from shop.models import gpt2, lm_loss

    torch.manual_seed(0)
    network = gpt2(**model, n_head=2).train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, fused=True)
    loader = python_text(batch_size=8, samples=4096)
    seconds: list[float] = []
    while len(seconds) < steps:
        began = time.perf_counter()
        for batch in loader:
            inputs = {key: value for key, value in batch.items() if key != "labels"}
            total, count = lm_loss(network(**inputs), batch)
            loss = total / count
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss.item()
            seconds.append(time.perf_counter() - began)
            began = time.perf_counter()
            if len(seconds) == steps:
                break
    return statistics.median(seconds[WARMUPS:])


def saturn(model: dict[str, Any], steps: int, here: Ranks) -> float:
    seconds: list[float] = []

    def note(event: dict[str, Any]) -> None:
        if event["event"] == "step":
            seconds.append(event["seconds"])

    request = TrainRequest(job=job(model, steps).to_dict(), technique="single", parameters={}, folder="")
    train(request, dataclasses.replace(here, _emit=note))
    return statistics.median(seconds[WARMUPS:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--out", type=Path, help="write the results here, too")
    given = parser.parse_args()
    cases = {}
    for name, model in MODELS.items():
        (pairs,) = ranks.launch(turns, model, given.steps, given.turns, size=1)
        ratio = statistics.median(own / other for other, own in pairs)
        step = statistics.median(other for other, _ in pairs)
        cases[name] = {"plain_seconds": step, "ratio": ratio, "turns": pairs}
        print(
            f"{name:8} plain step {1000 * step:6.2f} ms   Saturn's over it {ratio:.3f} (aim {AIM})",
            flush=True,
        )
    if given.out:
        given.out.write_text(json.dumps({"machine": describe(), "aim": AIM, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
