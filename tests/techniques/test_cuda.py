"""The techniques on real GPUs, as many as there are up to two; `make test-cuda` runs these, minutes at most.

With ``SATURN_CUDA_TESTS_ON=cpu`` they run on CPU ranks, which shows whether the tests themselves are right.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import torch
from cells import Outcome, Strategy, deviation, job, run
from cells import request as train_request

from saturn_airflow.launch.failures import RanksFailedError
from saturn_airflow.model.jobs import HParams, Job
from saturn_airflow.training import ranks as ranks_module
from saturn_airflow.training.ranks import Ranks

ON = os.environ.get("SATURN_CUDA_TESTS_ON", "cuda")
GPUS = torch.cuda.device_count() if ON == "cuda" else 2
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.ranks,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(not GPUS, reason="there is no GPU"),
]

# Sums in float64 in another order.
CLOSE = 1e-10
STOPPED_AT = 3
SINGLE = Strategy("single")
STRATEGIES = [
    SINGLE,
    Strategy("single", 1, {"recompute": True}),
    Strategy("spill"),
    Strategy("spill", 1, {"resident": 9}),
    Strategy("spill", 1, {"stay": 2}),
    Strategy("tensor", 1),
    Strategy("pipeline", 1, {"micro_batches": 2}),
    *[
        strategy
        for strategy in (
            Strategy("ddp", 2),
            Strategy("fsdp", 2),
            Strategy("fsdp", 2, {"recompute": True, "offload": True}),
            Strategy("tensor", 2),
            Strategy("pipeline", 2),
        )
        if GPUS >= 2
    ],
]
HPARAMS = HParams(
    epochs=2,
    precision="float64",
    lr=1e-2,
    accumulate=2,
    clip_grad_norm=0.5,
    parameter_groups="tiny:two_groups",
)
JOBS: dict[str, Job] = {
    "llama": job(load_model="tiny:tied_llama", hparams=HPARAMS),
    "llama, unclipped": job(
        load_model="tiny:llama", hparams=dataclasses.replace(HPARAMS, clip_grad_norm=None)
    ),
    "vit": job(
        load_model="tiny:vit",
        load_dataloader="tiny:images",
        loss_function="tiny:image_loss",
        hparams=HPARAMS,
    ),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Outcome]:
    """Every job under every strategy, uninterrupted, and gone on with after a stop under another."""
    folder = tmp_path_factory.mktemp("cuda")
    keys: list[tuple[str, str]] = []
    whole, first, second = [], [], []
    for name, a_job in JOBS.items():
        for number, strategy in enumerate(STRATEGIES):
            before = STRATEGIES[number - 1]
            keys.append((name, str(strategy)))
            place = folder / name / str(number)
            whole.append((train_request(a_job, strategy, place / "whole"), strategy.devices))
            stopped = train_request(a_job, before, place / "resumed", batch_count=STOPPED_AT)
            first.append((stopped, before.devices))
            second.append((train_request(a_job, strategy, place / "resumed"), strategy.devices))
    found = dict(zip(keys, run(whole, ON), strict=True))
    run(first, ON)
    resumed = zip(((name, f"to {strategy}") for name, strategy in keys), run(second, ON), strict=True)
    return {**found, **dict(resumed)}


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("name", JOBS)
def test_trains_as_single(name: str, strategy: Strategy, outcomes: dict[tuple[str, str], Outcome]) -> None:
    losses, weights = deviation(outcomes[name, str(SINGLE)], outcomes[name, str(strategy)])
    assert max(losses, weights) <= CLOSE


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("name", JOBS)
def test_goes_on_with_what_another_strategy_began(
    name: str, strategy: Strategy, outcomes: dict[tuple[str, str], Outcome]
) -> None:
    single, resumed = outcomes[name, str(SINGLE)], outcomes[name, f"to {strategy}"]
    assert min(resumed.losses) == STOPPED_AT + 1
    later = {step: loss for step, loss in single.losses.items() if step > STOPPED_AT}
    losses, weights = deviation(Outcome(later, single.weights), resumed)
    assert max(losses, weights) <= CLOSE


def test_a_gpu_trains_as_a_cpu_does(tmp_path: Path, outcomes: dict[tuple[str, str], Outcome]) -> None:
    (on_cpu,) = run([(train_request(JOBS["llama"], SINGLE, tmp_path), 1)])
    assert max(deviation(on_cpu, outcomes["llama", str(SINGLE)])) <= CLOSE


def too_much(ranks: Ranks) -> None:
    """Ask for a pebibyte."""
    torch.empty(2**50, dtype=torch.uint8, device=ranks.device)


def test_too_little_memory_is_told_as_such() -> None:
    with pytest.raises(RanksFailedError) as raised:
        ranks_module.launch(too_much, size=1, device_type=ON)
    assert raised.value.failure.status == "out_of_memory"
