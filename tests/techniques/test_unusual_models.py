"""Models that do more than compute layer after layer train as a plain loop does, or are refused at the trial.

What is exact goes through the guard and the loop; what is refused, is by the first of its ranks that notices.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import odd
import pytest
import torch
import unusual
from cells import Strategy, job, one_of_each, run
from cells import request as train_request
from plain_training import train_plainly

from saturn_airflow import library
from saturn_airflow.launch.failures import RanksFailedError
from saturn_airflow.launch.request import DoesNotFit, TrainRequest
from saturn_airflow.model import references
from saturn_airflow.model.jobs import HParams
from saturn_airflow.parallelism import sharding
from saturn_airflow.training import ranks as ranks_module
from saturn_airflow.training.guarding.guarded import check
from saturn_airflow.training.ranks import Ranks

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(2400)]

LOSSES, WEIGHTS = 1e-12, 1e-11
STEPS = 2

SINGLE, SPILL = Strategy("single"), Strategy("spill")
DDP, FSDP, PIPELINE, TENSOR = (Strategy(name, 2) for name in ("ddp", "fsdp", "pipeline", "tensor"))
AT_ONCE = Strategy("fsdp", 2, {"by_block": False})

# What each model trains exactly under.
EXACT: dict[str, tuple[Strategy, ...]] = {
    "gradient penalty in the loss": (SINGLE, SPILL, DDP),
    "gradient penalty in the model": (SPILL, DDP, AT_ONCE),
    "gradient penalty while training": (DDP, AT_ONCE),
    "gradient penalty where gradients are recorded": (AT_ONCE,),
    "a forecast that is a gradient": (SPILL, AT_ONCE),
    "a step on weights within a step": (SPILL, TENSOR),
    "inputs moved against the gradient": (SPILL, DDP, AT_ONCE, TENSOR),
    "two passes through all layers": (DDP, AT_ONCE, TENSOR),
    "calls itself": (DDP, FSDP),
    "activations kept elsewhere": (FSDP,),
    "called again by the loss": (DDP, TENSOR),
    "gradients of samples by vmap": (SINGLE, DDP, FSDP, PIPELINE),
    "an ensemble by vmap": (FSDP, PIPELINE),
    "an ensemble of stacked copies": (FSDP, PIPELINE),
    "a derivative forward through the blocks": (SINGLE, DDP, FSDP),
    "a derivative forward through the last layer": (SPILL, FSDP, PIPELINE, TENSOR),
    "blocks checkpointed": (SPILL, DDP, FSDP),
    "blocks checkpointed, reentrant": (SPILL, FSDP, TENSOR),
    "blocks checkpointed by twos": (SPILL, FSDP),
    "checkpoints in blocks": (FSDP, PIPELINE),
    "checkpoints in blocks, reentrant": (FSDP, PIPELINE),
    "forward hooks": (SPILL, DDP, FSDP, PIPELINE, TENSOR),
    "a backward hook on a block": (SPILL, DDP, FSDP, PIPELINE, TENSOR),
    "a backward hook on a layer": (FSDP, PIPELINE),
    "a backward hook on the last layer": (FSDP, PIPELINE),
    "a backward pre-hook on a block": (FSDP, PIPELINE),
    "hooks on activations": (SPILL, FSDP, PIPELINE),
    "parametrizations": (SPILL, FSDP, PIPELINE),
    "blocks that change their inputs": (DDP, AT_ONCE, PIPELINE, TENSOR),
    "a model that changes its inputs": (SINGLE, FSDP, PIPELINE),
    "gives what it trains as its parameters": (SPILL, FSDP, PIPELINE, TENSOR),
    "adapters merged to evaluate": (SINGLE, FSDP),
    "one block many times": (AT_ONCE,),
    "a layer many times": (DDP, FSDP),
    "a named tuple": (FSDP, PIPELINE),
    "an object": (DDP, FSDP, PIPELINE),
    "a tensor beside an object": (FSDP,),
    "gradients turned around": (FSDP, PIPELINE),
    "codes without a gradient of their own": (FSDP, PIPELINE),
    "a frozen copy as a teacher": (FSDP, PIPELINE),
    "parameters in lists and dictionaries": (FSDP, PIPELINE),
    "weights that a network makes": (FSDP, PIPELINE),
    "weights normed within the model": (FSDP, PIPELINE),
    "a fixed point": (AT_ONCE,),
}

WITHIN = "computes gradients within the forward pass"
# What is refused, and words of the reason; fsdp then tries by_block=False.
REFUSED: list[tuple[str, Strategy, str]] = [
    ("gradient penalty in the loss", FSDP, WITHIN),
    ("gradient penalty in the model", FSDP, WITHIN),
    ("gradient penalty in the loss", AT_ONCE, WITHIN),
    ("gradient penalty in the loss", PIPELINE, "uses what block 'blocks.0' computed"),
    ("gradient penalty while training", PIPELINE, WITHIN),
    ("gradient penalty where gradients are recorded", PIPELINE, WITHIN),
    ("gradient penalty in the model", TENSOR, "tensor x 2 changes the result: the gradient of"),
    ("inputs moved against the gradient", FSDP, WITHIN),
    ("called again by the loss", AT_ONCE, "used outside of the forward pass"),
    ("a derivative forward through the blocks", SPILL, "functorch"),
    ("a derivative forward through the blocks", TENSOR, "tensor x 2 can't train what one device can"),
    ("a derivative forward through the blocks", PIPELINE, "by torch.func"),
    ("adapters merged to evaluate", PIPELINE, "pipeline x 2 can't train what one device can: RuntimeError: "),
    ("blocks checkpointed, reentrant", DDP, "use_reentrant=False"),
    ("blocks checkpointed, reentrant", PIPELINE, "leave that to pipeline"),
    ("blocks checkpointed", PIPELINE, "leave that to pipeline"),
    ("blocks that change their inputs", SPILL, "an input of block 'blocks.0' is changed in place"),
    ("blocks that change their inputs", FSDP, "changed in place"),
    ("a fixed point", PIPELINE, "once each and in order"),
]
CELLS = [(name, strategy) for name, strategies in EXACT.items() for strategy in strategies]


def a_job(name: str) -> Any:
    return job(
        load_model="unusual:model",
        load_dataloader="odd:vectors",
        loss_function=unusual.loss_of(name),
        model_args={"name": name},
        hparams=HParams(batches=STEPS, precision="float64", lr=1e-2),
    )


def check_all(requests: list[TrainRequest], ranks: Ranks) -> list[str]:
    """What the guard says of each."""
    return [check(request, ranks)["guard"] for request in requests]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[tuple[str, str], Any]:
    """Verdicts, and what the loop did, of the chosen cells."""
    items = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    chosen = [cell for cell in CELLS if {"name": cell[0], "strategy": cell[1]} in items]
    with tempfile.TemporaryDirectory() as root:
        requests = [
            (train_request(a_job(name), strategy, Path(root, str(number))), strategy.devices)
            for number, (name, strategy) in enumerate(chosen)
        ]
        verdicts: dict[int, str] = {}
        for size in (1, 2):
            numbers = [number for number, (_, devices) in enumerate(requests) if devices == size]
            if numbers:
                said = ranks_module.launch(check_all, [requests[n][0] for n in numbers], size=size)[0]
                verdicts.update(zip(numbers, said, strict=True))
        trained = enumerate(run(requests))
        return {
            (chosen[number][0], str(chosen[number][1])): (verdicts[number], outcome)
            for number, outcome in trained
        }


@pytest.mark.parametrize(("name", "strategy"), one_of_each(CELLS), ids=str)
def test_is_exact(
    name: str,
    strategy: Strategy,
    outcomes: dict[tuple[str, str], Any],
    record_deviation: Callable[[str, float, float], None],
) -> None:
    verdict, outcome = outcomes[name, str(strategy)]
    assert verdict == "exact"
    make_loss = references.load(unusual.loss_of(name))
    optimizer = references.load("torch.optim:AdamW")
    losses, weights = train_plainly(unusual.model(name), odd.vectors(), make_loss, optimizer, STEPS)
    off = max(abs(losses[step] - loss) for step, loss in outcome.losses.items())
    weights_off = max(float((value - weights[key]).abs().max()) for key, value in outcome.weights.items())
    record_deviation("unusual models", off, weights_off)
    assert len(outcome.losses) == STEPS
    assert off <= LOSSES
    assert weights_off <= WEIGHTS


@pytest.mark.parametrize(("name", "strategy", "words"), REFUSED, ids=lambda part: str(part)[:40])
def test_is_refused_with_the_reason(name: str, strategy: Strategy, words: str, tmp_path: Path) -> None:
    request = train_request(a_job(name), strategy, tmp_path)
    with pytest.raises(RanksFailedError) as raised:
        ranks_module.launch(check_all, [request], size=strategy.devices)
    assert raised.value.failure.status in ("does_not_fit", "changes_result")
    assert words in raised.value.failure.reason


def test_what_a_block_returns_comes_out_of_fsdps_hooks_as_it_was() -> None:
    block = torch.nn.Identity()
    outputs: tuple[Any, ...] = ((), (1,), [], {}, None)
    for output in outputs:
        assert sharding._repack_objects(block, (), sharding._unpack_objects(block, (), output)) == output


@pytest.mark.parametrize("technique", ["ddp", "fsdp"])
@pytest.mark.parametrize("embedding", [torch.nn.Embedding, torch.nn.EmbeddingBag])
def test_an_embedding_whose_vectors_are_shortened_is_refused_before_one_is_too_long(
    technique: str, embedding: Callable[..., torch.nn.Module]
) -> None:
    model = torch.nn.Sequential(embedding(11, 4, max_norm=1e3), torch.nn.Linear(4, 3))
    ranks = Ranks(rank=0, size=2, device=torch.device("cpu"))
    with pytest.raises(DoesNotFit, match="with max_norm, which shortens"):
        library.get(technique).parallelize(model, ranks)
