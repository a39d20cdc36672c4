"""A loss that is 0 on the few samples that are compared first is compared on whole batches."""

from __future__ import annotations

import pytest
from checking import Cell, job, verdicts

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


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    return dict(zip(CELLS, verdicts([cell for cell, _ in CELLS.values()]), strict=True))


@pytest.mark.parametrize("what", CELLS)
def test_what_shows_in_whole_batches_alone_is_refused_in_parts(what: str, found: dict[str, str]) -> None:
    assert CELLS[what][1] in found[what]
