"""The loop that techniques are compared with takes the steps that a plain loop takes, of odd jobs as well."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from checking import Cell, job, verdicts

from saturn_airflow.launch import failures
from saturn_airflow.model.errors import JobError
from saturn_airflow.training.guarding.comparing import noting_formats
from saturn_airflow.training.guarding.plain import PlainLoop

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1200)]

NOISE = job(hparams={"optimizer": "odd_optimizers:AddsNoise"})
WITHOUT_ALL = "can't: optimizer 'odd_optimizers:AddsNoise' updates a part of a parameter otherwise"


def clipped(model: str, optimizer: str) -> Cell:
    changes = {"optimizer": f"torch.optim:{optimizer}", "clip_grad_norm": 1e-3}
    return Cell(job(load_model=f"sparse_models:{model}", hparams=changes), "single")


CELLS: dict[str, tuple[Cell, str]] = {
    **{
        f"an optimizer that draws noise under {technique}": (Cell(NOISE, technique, devices), verdict)
        for technique, devices, verdict in [
            ("single", 1, "exact"),
            ("spill", 1, "exact"),
            ("ddp", 2, "exact"),
            ("fsdp", 2, WITHOUT_ALL),
        ]
    },
    "sparse gradients that are clipped": (clipped("only", "SparseAdam"), "exact"),
    "some sparse gradients that are clipped": (clipped("some", "SGD"), "exact"),
}


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    return dict(zip(CELLS, verdicts([cell for cell, _ in CELLS.values()]), strict=True))


@pytest.mark.parametrize("what", CELLS)
def test_the_plain_steps_are_those_of_a_plain_loop(what: str, found: dict[str, str]) -> None:
    assert found[what].startswith(CELLS[what][1]), found[what]


def of_three(outputs: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return outputs.mean()


def of_another_shape(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.mm(outputs, torch.ones(7, 7).to(outputs)).mean()


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        ("of_three", "is called with the model's outputs and the targets: missing a required argument"),
        ("of_another_shape", "raised RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
    ],
)
def test_a_wrong_loss_is_not_taken_for_the_model_s_mistake(loss: str, says: str) -> None:
    own = job(loss_function=f"{__name__}:{loss}")
    model = torch.nn.Linear(3, 2).double()
    loop = PlainLoop(own, model, torch.device("cpu"))
    watching = noting_formats(SimpleNamespace(number_format=torch.float64), model)
    with watching, pytest.raises(JobError) as raised:
        loop.loss((torch.ones(4, 3, dtype=torch.float64), torch.ones(4, 2)))
    assert str(raised.value).startswith(f"loss_function '{__name__}:{loss}' {says}")
    assert "saturn_airflow" not in failures.describe(raised.value).traceback
