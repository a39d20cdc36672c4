"""What bends where no step that is compared comes to is refused where parts of it would bend otherwise."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from checking import Cell, job, verdicts

from saturn_airflow.training.guarding.bent_losses import bends

pytestmark = pytest.mark.ranks

LOSS, GRADIENT = "no linear function of the means over a batch", "does not grow as the loss does"


def loss(name: str, **hparams: Any) -> Any:
    return job(loss_function=f"bent_jobs:{name}", hparams=hparams)


def penalised(name: str) -> Any:
    return job(load_model="bent_jobs:WithInputs", loss_function=f"bent_jobs:{name}")


def own(kind: str) -> Any:
    changes: dict[str, Any] = {"load_model": "bent_jobs:OwnSteps", "model_args": {"kind": kind}}
    return job(**changes, own_step=True, loss_function=None, hparams={})


REFUSED = {
    **{
        f"{name} under ddp": (Cell(loss(name), "ddp", 2), LOSS)
        for name in ("clamped", "clamped_far", "at_least")
    },
    "left_out in micro-batches": (Cell(loss("left_out", accumulate=2), "single"), LOSS),
    "clamped under fsdp": (Cell(loss("clamped"), "fsdp", 2), LOSS),
    "clamped_penalty under ddp": (Cell(penalised("clamped_penalty"), "ddp", 2), LOSS),
    "an own step's loss": (Cell(own("loss"), "ddp", 2), LOSS),
    **{
        f"an own step's {kind}": (Cell(own(kind), "ddp", 2), GRADIENT)
        for kind in ("hooks", "states", "torch.autograd's")
    },
}
RIGHT = {
    "clamped alone": Cell(loss("clamped"), "single"),
    **{f"{name} under ddp": Cell(loss(name), "ddp", 2) for name in ("each_clamped", "weighed")},
    "penalised under ddp": Cell(penalised("penalised"), "ddp", 2),
    **{f"an own step's {kind}": Cell(own(kind), "ddp", 2) for kind in ("weights", "by hand", "recomputed")},
    "an own step alone": Cell(own("loss"), "single"),
}


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    cells = [*(cell for cell, _ in REFUSED.values()), *RIGHT.values()]
    names = [*(f"refused {name}" for name in REFUSED), *RIGHT]
    return dict(zip(names, verdicts(cells), strict=True))


@pytest.mark.parametrize("what", REFUSED)
def test_what_bends_is_refused_where_it_is_cut(what: str, found: dict[str, str]) -> None:
    said = found[f"refused {what}"]
    assert said.startswith("refused"), said
    assert REFUSED[what][1] in said


@pytest.mark.parametrize("what", RIGHT)
def test_what_bends_as_on_one_device_is_not(what: str, found: dict[str, str]) -> None:
    assert found[what] == "exact"


@pytest.mark.parametrize("clamps", [False, True])
def test_what_an_expert_does_with_the_only_sample_that_it_gets_is_no_mean_of_the_batch(clamps: bool) -> None:
    torch.manual_seed(0)
    gate, expert = torch.nn.Linear(4, 2), torch.nn.Linear(4, 1)

    def loss(number: int) -> torch.Tensor:
        x = torch.randn(6 - number, 4, generator=torch.Generator().manual_seed(number))
        share = gate(x).softmax(-1)[:, 0]
        own = x[:, 0].argmax().unsqueeze(0)
        out = expert(x[own]) * torch.sigmoid(share[own]) * torch.tanh(share[int(own)])
        mean = x.matmul(expert.weight.T).index_add(0, own, out).square().mean()
        return mean.clamp(max=20.0) if clamps else mean.exp().log()

    assert bends(loss, contextlib.nullcontext) is clamps


@pytest.mark.parametrize("number_format", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("most", [1e30, 20.0])
def test_what_bends_is_told_from_rounding(number_format: torch.dtype, most: float) -> None:
    torch.manual_seed(0)
    weight = torch.randn(4, 1, dtype=number_format, requires_grad=True)

    def loss(number: int) -> torch.Tensor:
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(number)).to(number_format)
        first, second = (x @ weight).square().mean(), (x @ weight).abs().mean()
        return (first / 3 + second * 0.7).clamp(max=most)

    assert bends(loss, contextlib.nullcontext) is (most == 20.0)


@pytest.mark.parametrize("clamps", [False, True])
def test_what_is_written_into_a_tensor_is_followed(clamps: bool) -> None:
    weight = torch.nn.Parameter(torch.randn(4, dtype=torch.float64))

    def loss(number: int) -> torch.Tensor:
        x = torch.randn(6 - number, 4, generator=torch.Generator().manual_seed(number)).double()
        losses = torch.zeros(2, dtype=torch.float64)
        losses[0] = torch.stack([(x * weight).square().mean(), (x @ weight).abs().mean()]).sum()
        losses[1] = weight.square().sum()
        total = losses.sum()
        return total.clamp(max=50.0) if clamps else total

    assert bends(loss, contextlib.nullcontext) is clamps
