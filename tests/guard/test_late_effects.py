"""What begins long after the steps that are compared is refused by what they show of it."""

from __future__ import annotations

from typing import Any

import pytest
from checking import Cell, job, verdicts

pytestmark = pytest.mark.ranks

ON_ONE = r"on one device and"
BENT = "does not grow as the loss does"


def counts(kind: str, what: str = "samples") -> dict[str, Any]:
    return {"load_model": f"late_effects:counts_{what}", "model_args": {"kind": kind}}


def clamps(where: str) -> dict[str, Any]:
    return {"load_model": "late_effects:clamps", "model_args": {"where": where}}


KINDS = ("global", "class", "dict", "object", "namespace", "tensor", "float", "numpy", "float tensor")
HOOKS = ("hooks", "hooks after it is added up", "states", "noise")

REFUSED = {
    **{f"samples in a {kind}": (Cell(job(**counts(kind)), "ddp", 2), ON_ONE) for kind in KINDS},
    "samples of own steps": (
        Cell(
            job(load_model="late_effects:OwnSteps", own_step=True, loss_function=None, hparams={}), "ddp", 2
        ),
        "'late_effects.SEEN' is",
    ),
    "passes that are made twice": (Cell(job(**counts("global", "passes")), "ForwardTwice"), ON_ONE),
    **{where: (Cell(job(**clamps(where)), "ddp", 2), BENT) for where in HOOKS},
    "hooks in micro-batches": (Cell(job(hparams={"accumulate": 2}, **clamps("hooks")), "single"), BENT),
}
RIGHT = {
    **{f"passes in a {kind}": Cell(job(**counts(kind, "passes")), "ddp", 2) for kind in KINDS},
    **{f"{where} on one device": Cell(job(**clamps(where)), "single") for where in HOOKS[:3]},
    "states in micro-batches": Cell(job(hparams={"accumulate": 2}, **clamps("states")), "single"),
    "sums": Cell(job(load_model="late_effects:adds_up"), "ddp", 2),
    "masks": Cell(job(load_model="late_effects:masks"), "ddp", 2),
    "small gradients in float16": Cell(
        job(
            load_model="late_effects:Narrow",
            hparams={"precision": "float32", "optimizer": "torch.optim:SGD", "lr": 0.01},
        ),
        "ddp",
        2,
    ),
}


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    cells = [*(cell for cell, _ in REFUSED.values()), *RIGHT.values()]
    return dict(zip([*REFUSED, *RIGHT], verdicts(cells), strict=True))


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_come_out_otherwise_later_is_refused(what: str, found: dict[str, str]) -> None:
    assert found[what].startswith("refused"), found[what]
    assert REFUSED[what][1] in found[what]


@pytest.mark.parametrize("what", RIGHT)
def test_what_stays_the_same_is_not(what: str, found: dict[str, str]) -> None:
    assert found[what] == "exact"
