"""A step of Saturn's loop beside one of a plain PyTorch loop, on one device: `python benchmarks/loop.py`.

The same model, data, loss and optimizer in one process, in turns: the median step of each turn, and the
median of the turns' ratios. The plain loop knows nothing of Saturn. Besides the time that passes, the time
that the thread which trains has a core for: where others use the cores as well, only that can be compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from itertools import pairwise
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
    "shortest": {"n_layer": 1, "n_embd": 32},
    "short": {"n_layer": 2, "n_embd": 64},
    "middle": {"n_layer": 3, "n_embd": 96},
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


class Stopwatch:
    """How long steps took, of all time and of the time that this thread had a core for."""

    def __init__(self) -> None:
        self._times = [(time.perf_counter(), time.thread_time())]

    @property
    def steps(self) -> int:
        return len(self._times) - 1

    def step_ends(self) -> None:
        self._times.append((time.perf_counter(), time.thread_time()))

    def medians(self) -> tuple[float, float]:
        """Seconds of a step, after those that warm up."""
        pairs = list(pairwise(self._times))[WARMUPS:]
        wall, core = zip(*((b[0] - a[0], b[1] - a[1]) for a, b in pairs), strict=True)
        return statistics.median(wall), statistics.median(core)


def turns(model: dict[str, Any], steps: int, count: int, here: Ranks) -> list[list[float]]:
    """Seconds of a plain step, and of time on a core, and the same of Saturn's, in so many turns."""
    sys.path.insert(0, DAGS)
    plain(model, 2 * WARMUPS)
    return [[*plain(model, steps), *saturn(model, steps, here)] for _ in range(count)]


def plain(model: dict[str, Any], steps: int) -> tuple[float, float]:
    from shop.data import python_text
    from shop.models import gpt2, lm_loss

    torch.manual_seed(0)
    network = gpt2(**model, n_head=2).train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, fused=True)
    loader = python_text(batch_size=8, samples=4096)
    watch = Stopwatch()
    while watch.steps < steps:
        for batch in loader:
            inputs = {key: value for key, value in batch.items() if key != "labels"}
            total, count = lm_loss(network(**inputs), batch)
            loss = total / count
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss.item()
            watch.step_ends()
            if watch.steps == steps:
                break
    return watch.medians()


def saturn(model: dict[str, Any], steps: int, here: Ranks) -> tuple[float, float]:
    watch = Stopwatch()

    def note(event: dict[str, Any]) -> None:
        here._emit(event)
        if event["event"] == "step":  # the time to tell of it counts, too
            watch.step_ends()

    request = TrainRequest(job=job(model, steps), technique="single", parameters={}, folder="")
    train(request, dataclasses.replace(here, _emit=note))
    return watch.medians()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--turns", type=int, default=21)
    parser.add_argument("--out", type=Path, help="write the results here, too")
    given = parser.parse_args()
    cases = {}
    for name, model in MODELS.items():
        (taken,) = ranks.launch(turns, model, given.steps, given.turns, size=1)
        step = statistics.median(turn[0] for turn in taken)
        ratio = statistics.median(own / other for other, _, own, _ in taken)
        on_core = statistics.median(own / other for _, other, _, own in taken)
        cases[name] = {"plain_seconds": step, "ratio": ratio, "ratio_on_a_core": on_core, "turns": taken}
        print(
            f"{name:9}plain step {1000 * step:6.2f} ms   Saturn's over it {ratio:.3f}, on a core "
            f"{on_core:.3f} (aim {AIM})",
            flush=True,
        )
    if given.out:
        given.out.write_text(json.dumps({"machine": describe(), "aim": AIM, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
