"""A loss that is 0 on the few samples that are compared first is compared on whole batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checking import Cell, job, verdicts

from saturn_airflow.model.errors import JobError
from saturn_airflow.training.guarding import first_steps
from saturn_airflow.training.guarding.first_steps import WHOLE
from saturn_airflow.training.guarding.plain import Step
from saturn_airflow.training.guarding.samples import samples
from saturn_airflow.training.ranks import Ranks

pytestmark = pytest.mark.ranks

NOTHING = "may change the result: no weight has a gradient"


def of(loss: str, technique: str, devices: int = 1, accumulate: int = 1) -> Cell:
    one = job(loss_function=f"pair_jobs:{loss}", hparams={"accumulate": accumulate})
    return Cell(one, technique, devices)


CELLS = {
    "pairs in micro-batches": (of("pairs", "single", accumulate=3), "refused"),
    "pairs under ddp": (of("pairs", "ddp", 2), "refused"),
    "pairs under fsdp": (of("pairs", "fsdp", 2), "refused"),
    "pairs of one device": (of("pairs", "single"), "exact"),
    "nothing in micro-batches": (of("nothing", "single", accumulate=2), NOTHING),
    "nothing under ddp": (of("nothing", "ddp", 2), NOTHING),
    "nothing of one device": (of("nothing", "spill"), "exact"),
}


def test_what_whole_batches_raise_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def take_each(plain: first_steps.PlainSteps, *unused: Any) -> None:
        if plain.sizes[0] == WHOLE:
            raise JobError("a resumed job would have lost it")
        plain.steps.append(Step(0.0, None, samples({"weight": torch.zeros(1)}), {}, {}, {}, frozenset()))

    monkeypatch.setattr(first_steps, "take_each", take_each)
    nothing: Any = None
    ranks = Ranks(rank=0, size=1, device=torch.device("cpu"))
    with pytest.raises(JobError, match="would have lost it"):
        first_steps.take(job(), nothing, nothing, ranks, nothing, None, whole_batch=False)


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    return dict(zip(CELLS, verdicts([cell for cell, _ in CELLS.values()]), strict=True))


@pytest.mark.parametrize("what", CELLS)
def test_what_shows_in_whole_batches_alone_is_refused_in_parts(what: str, found: dict[str, str]) -> None:
    assert CELLS[what][1] in found[what]
