"""Whatever model chance puts together: exact under every technique, or refused; never wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from families import launches, matrix, truth
from families.matrix import Cell, Strategy
from families.randomly import descriptions
from families.verdicts import Result

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1200)]

STRATEGIES = (
    Strategy("single", parameters={"recompute": True}),
    Strategy("single", accumulate=2),
    Strategy("spill"),
    Strategy("ddp", 2),
    Strategy("fsdp", 2),
    Strategy("pipeline", 2),
)


@settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(description=descriptions)
def test_exact_or_refused(description: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("random")
    name = json.dumps(description)
    adapted = {"optimizer": description["optimizer"], "optimizer_args": {"weight_decay": 0.05}, "lr": 0.05}
    chosen = [Cell(matrix.recipe(name, strategy, **adapted), strategy) for strategy in STRATEGIES]
    for recipe in matrix.truths(chosen):
        truth.save(recipe, folder)
    wrong = [
        f"{cell.strategy}: {result}"
        for cell, result in _run(chosen, folder)
        if result.verdict not in ("exact", "refused")
    ]
    assert not wrong, "\n".join(wrong)


def _run(chosen: list[Cell], folder: Path) -> list[tuple[Cell, Result]]:
    results: list[tuple[Cell, Result]] = []
    launches.run(chosen, folder, lambda cell, result: results.append((cell, result)))
    return results
