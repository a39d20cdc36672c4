"""Running many small trainings in one set of ranks, and comparing them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from saturn_airflow.launch.request import DoesNotFit, TrainRequest
from saturn_airflow.model.jobs import HParams, Job
from saturn_airflow.training import ranks as ranks_module
from saturn_airflow.training.checkpoints import read_weights
from saturn_airflow.training.loop import train
from saturn_airflow.training.ranks import Ranks


@dataclass(frozen=True)
class Strategy:
    """A technique with its parameters on ``devices`` devices."""

    technique: str
    devices: int = 1
    parameters: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        tuned = ",".join(f"{key}={value}" for key, value in self.parameters.items())
        return f"{self.technique}[{tuned}]@{self.devices}" if tuned else f"{self.technique}@{self.devices}"


#: Each of Saturn's own on the fewest devices that it is meant for.
EACH_TECHNIQUE = [
    Strategy("single"),
    Strategy("spill"),
    Strategy("ddp", 2),
    Strategy("fsdp", 2),
    Strategy("tensor", 2),
    Strategy("pipeline", 2),
]


def one_of_each(cells: Sequence[tuple[Any, ...]]) -> list[Any]:
    """``cells`` as parameters of a test, all but one of each name marked ``nightly``: the first of the first
    name, the second of the second, and so on.

    :param cells: the name of a model or job first.
    """
    names = [cell[0] for cell in cells]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    places = [names[:place].count(name) for place, name in enumerate(names)]
    return [
        cell if place == numbers[name] % names.count(name) else pytest.param(*cell, marks=pytest.mark.nightly)
        for cell, name, place in zip(cells, names, places, strict=True)
    ]


@dataclass
class Outcome:
    """What one training did: its losses by step, and its weights, or why it was refused."""

    losses: dict[int, float]
    weights: dict[str, torch.Tensor]
    refused: str | None = None


def job(**changes: Any) -> Job:
    """A small job: GPT-2 on tokens, ragged, unless changed."""
    fields: dict[str, Any] = {
        "load_model": "tiny:gpt2",
        "load_dataloader": "tiny:tokens",
        "loss_function": "tiny:token_loss",
        "hparams": HParams(precision="float64", lr=1e-2),
    }
    return Job("cell", **{**fields, **changes})


def request(a_job: Job, strategy: Strategy, folder: str | Path, **changes: Any) -> TrainRequest:
    return TrainRequest(
        job=a_job,
        technique=strategy.technique,
        parameters=strategy.parameters,
        folder=str(folder),
        checkpoint_seconds=None,
        **changes,
    )


def train_all(requests: list[TrainRequest], ranks: Ranks) -> list[tuple[dict[int, float], str | None]]:
    """Run each request on these ranks, one after the other: losses by step, and why it was refused."""
    done = []
    for one in requests:
        losses: dict[int, float] = {}

        def note(event: dict[str, Any], losses: dict[int, float] = losses) -> None:
            if event["event"] == "step":
                losses[event["step"]] = event["loss"]

        refused = None
        try:
            train(one, dataclasses.replace(ranks, _emit=note))
        except DoesNotFit as reason:
            refused = str(reason)
        done.append((losses, refused))
    return done


def run(requests: list[tuple[TrainRequest, int]], device_type: str = "cpu") -> list[Outcome]:
    """Run requests, each on its number of devices, those of one number in order; results as given."""
    outcomes: list[Outcome | None] = [None] * len(requests)
    for size in sorted({size for _, size in requests}):
        chosen = [i for i, (_, devices) in enumerate(requests) if devices == size]
        results = ranks_module.launch(
            train_all, [requests[i][0] for i in chosen], size=size, device_type=device_type
        )[0]
        for i, (losses, refused) in zip(chosen, results, strict=True):
            outcomes[i] = Outcome(losses, {} if refused else weights_in(requests[i][0]), refused)
    return [outcome for outcome in outcomes if outcome is not None]


def weights_in(a_request: TrainRequest) -> dict[str, torch.Tensor]:
    return read_weights(max(a_request.checkpoints.glob("step-*")))


def deviation(one: Outcome, other: Outcome) -> tuple[float, float]:
    """The largest difference of two trainings in losses and in weights."""
    assert not one.refused, one.refused
    assert not other.refused, other.refused
    assert one.losses.keys() == other.losses.keys()
    assert one.weights.keys() == other.weights.keys()
    losses = max(abs(one.losses[step] - other.losses[step]) for step in one.losses)
    weights = max(float((one.weights[n] - other.weights[n]).abs().max()) for n in one.weights)
    return losses, weights
