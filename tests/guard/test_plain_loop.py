"""The loop that techniques are compared with takes the steps that a plain loop takes, of odd jobs as well."""

from __future__ import annotations

import pytest
from checking import Cell, job, verdicts

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

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
