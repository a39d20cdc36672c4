"""The verdict on a training, next to its truth."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from families.family import find
from families.matrix import Cell, reference_keys
from saturn_airflow.training.checkpoints import read_weights

#: How far off the losses of a cell that is exact may be, relative to their size; ten times that its weights.
EXACT, EXACT_IN_FLOAT32 = 1e-9, 1e-5
#: Muon rounds gradients to bfloat16: what differs by 1e-16 may be rounded otherwise.
EXACT_IN_BFLOAT16 = 1e-3
#: Steps of a training that is resumed.
STEPS_BEFORE = 2


@dataclass
class Result:
    """What became of a cell.

    :param verdict: ``exact``, ``refused``, ``drawn`` (other random numbers than those of one device),
        ``wrong`` or ``error``.
    :param why: of what was refused or raised; else what differs most.
    :param losses: the largest relative difference of a loss; likewise ``weights``. Of what the guard refused
        too, where it can be trained all the same.
    :param guard: what the guard said; ``mistaken`` where it refused what is exact.
    """

    verdict: str
    why: str = ""
    losses: float | None = None
    weights: float | None = None
    guard: str = ""


@dataclass
class Outcome:
    """What was heard of a training: its losses by step, what the guard said, and how it ended if not well."""

    losses: dict[int, float] = field(default_factory=dict)
    guard: str = ""
    refused: str | None = None
    ended: Result | None = None


def judge(cell: Cell, outcome: Outcome, trained: Path, truths: Path) -> Result:
    """The verdict on a cell."""
    result = outcome.ended or compare(cell, outcome.losses, trained, truths)
    if outcome.refused is not None:
        # The guard looks at the first steps, which what is resumed has behind it.
        guard = "mistaken" if result.verdict == "exact" and cell.after is None else "refused"
        return Result("refused", outcome.refused, result.losses, result.weights, guard)
    if result.verdict == "drawn" and outcome.guard == "exact":
        result.verdict = "wrong"
    result.guard = outcome.guard
    return result


def compare(cell: Cell, losses: dict[int, float], trained: Path, truths: Path) -> Result:
    """The verdict on a cell that was trained in ``trained``; where it may agree with several, the best."""
    weights = weights_in(trained)
    results = [_against(cell, losses, weights, truths / f"{key}.pt") for key in reference_keys(cell)]
    return min(results, key=lambda result: (result.verdict != "exact", result.losses or 0.0))


def _against(cell: Cell, losses: dict[int, float], weights: dict[str, torch.Tensor], path: Path) -> Result:
    family = find(cell.recipe.family)
    truth: dict[str, Any] = torch.load(path)
    if "error" in truth:
        return Result("error", f"what it is compared with fails: {truth['error'].splitlines()[-1]}")
    expected = dict(enumerate(truth["losses"], 1))
    if cell.after:
        expected = {step: loss for step, loss in expected.items() if step > STEPS_BEFORE}
    if losses.keys() != expected.keys():
        return Result("wrong", f"steps {sorted(losses)} in the place of {sorted(expected)}")
    if weights.keys() != truth["weights"].keys():
        return Result("wrong", f"other weights: {sorted(weights.keys() ^ truth['weights'].keys())[:4]}")
    pairs = ((losses[step], loss) for step, loss in expected.items())
    off_losses = max(_off(*torch.tensor(pair, dtype=torch.float64)) for pair in pairs)
    off = {name: _off(weights[name], tensor) for name, tensor in truth["weights"].items()}
    worst = max(off, key=lambda name: off[name])
    bound = EXACT_IN_FLOAT32 if family.single_precision else EXACT
    bound = EXACT_IN_BFLOAT16 if cell.recipe.optimizer.endswith("Muon") else bound
    if off_losses <= bound and off[worst] <= 10 * bound:
        return Result("exact", "", off_losses, off[worst])
    return Result("drawn" if family.random else "wrong", worst, off_losses, off[worst])


def weights_in(trained: Path) -> dict[str, torch.Tensor]:
    """The weights of the last checkpoint of a training in this folder."""
    return read_weights(max((trained / "checkpoints").glob("step-*")))


def _off(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference, relative to what is larger than 1; infinite where either is no number."""
    if not other.numel():
        return 0.0
    one, other = one.reshape(other.shape).double(), other.double()
    off = ((one - other).abs() / other.abs().clamp(min=1.0)).max()
    return float(torch.nan_to_num(off, nan=float("inf")))
