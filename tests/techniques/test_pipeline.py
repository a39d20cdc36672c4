"""Pipelines of hard models next to plain loops, and of dropout across numbers of stages."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import staged
import tiny
import torch
from cells import Outcome, Strategy, job, run
from cells import request as train_request

from saturn_airflow.model.jobs import HParams, Job

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1200)]

LOSSES, WEIGHTS = 1e-12, 1e-11
HPARAMS = HParams(
    epochs=1,
    precision="float64",
    lr=0.02,
    optimizer="torch.optim:AdamW",
    optimizer_args={"weight_decay": 0.1},
    clip_grad_norm=0.3,
)
STRATEGIES = [
    Strategy("pipeline", 2, {"micro_batches": 3}),
    Strategy("pipeline", 2, {"micro_batches": 2, "schedule": "gpipe", "recompute": True, "cuts": [1]}),
    Strategy("pipeline", 3, {"micro_batches": 4}),
]
MODELS = ["Odd", "Recurrent", "narrowing"]


def vector_job(model: str, loss: str = "staged:mean_loss", **hparams: Any) -> Job:
    return job(
        load_model=model,
        load_dataloader="tiny:vectors",
        data_args={"shuffle": False},
        loss_function=loss,
        hparams=HParams(**{**vars(HPARAMS), **hparams}),
    )


def by_hand(model: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of a plain loop."""
    net = getattr(importlib.import_module("staged"), model)().double()
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.02, weight_decay=0.1)
    losses = []
    for inputs, targets in tiny.vectors(shuffle=False):
        loss = staged.mean_loss(net(inputs.double()), targets)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(trained, 0.3)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, dict(net.state_dict())


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Outcome]:
    folder = tmp_path_factory.mktemp("staged")
    cells = [(model, strategy) for model in MODELS for strategy in STRATEGIES]
    requests = [
        (train_request(vector_job(f"staged:{model}"), strategy, folder / str(number)), strategy.devices)
        for number, (model, strategy) in enumerate(cells)
    ]
    requests.append(
        (
            train_request(
                vector_job("staged:narrowing", "staged:loss_of_whole_batches"), STRATEGIES[0], folder / "w"
            ),
            2,
        )
    )
    keys = [*((model, str(strategy)) for model, strategy in cells), ("whole", "")]
    return dict(zip(keys, run(requests), strict=True))


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_hard_models_train_as_in_a_plain_loop(
    model: str, strategy: Strategy, outcomes: dict[tuple[str, str], Outcome]
) -> None:
    outcome = outcomes[model, str(strategy)]
    assert outcome.refused is None
    losses, weights = by_hand(model)
    assert list(outcome.losses.values()) == pytest.approx(losses, abs=LOSSES)
    assert outcome.weights
    for name, weight in outcome.weights.items():
        torch.testing.assert_close(weight, weights[name], rtol=0, atol=WEIGHTS)


def test_a_loss_that_fails_on_parts_is_not_the_jobs_fault(outcomes: dict[tuple[str, str], Outcome]) -> None:
    refused = outcomes["whole", ""].refused
    assert refused is not None
    assert "ValueError: fewer than four samples" in refused


def test_dropout_does_not_depend_on_how_a_model_is_cut(tmp_path: Path) -> None:
    """Two cuts and two numbers of stages draw the same masks, and one goes on where the other was stopped."""
    dropping = vector_job("tiny:dropping", "tiny:vector_loss", epochs=2, accumulate=2)
    strategies = [
        Strategy("pipeline", 2, {"micro_batches": 2, "cuts": [1]}),
        Strategy("pipeline", 2, {"micro_batches": 2, "cuts": [3], "schedule": "gpipe"}),
        Strategy("pipeline", 3, {"micro_batches": 2}),
    ]
    requests = [(train_request(dropping, s, tmp_path / f"{i}"), s.devices) for i, s in enumerate(strategies)]
    begun = train_request(dropping, strategies[0], tmp_path / "moved", batch_count=3)
    one, other, more, part = run([*requests, (begun, 2)])
    (rest,) = run([(train_request(dropping, strategies[2], tmp_path / "moved"), 3)])
    moved = Outcome({**part.losses, **rest.losses}, rest.weights)
    assert len(set(one.losses.values())) == len(one.losses)
    for same in (other, more, moved):
        assert same.refused is None
        assert same.losses == pytest.approx(one.losses, abs=LOSSES)
        for name, weight in one.weights.items():
            torch.testing.assert_close(same.weights[name], weight, rtol=0, atol=WEIGHTS)
