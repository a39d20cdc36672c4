"""Losses of a Trainer on a GPU, whose kernels add in any order, before and after a stop."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from saturn_airflow.launch.request import ChangesResultError
from saturn_airflow.model import guards
from saturn_airflow.training.ranks import Ranks

pytest.importorskip("transformers")
from saturn_airflow.training.trainers import resumed

WHOLE = [4.0, 3.0, 2.0, 1.0]


def compared(resumed_losses: list[float], unstopped: list[float], device: str) -> tuple[str, int]:
    """The verdict, and how many trainings were made for it."""
    takes = iter([resumed_losses, unstopped])
    made: list[Path] = []

    def training(request: Any, ranks: Ranks, folder: Path, **settings: Any) -> Any:
        made.append(folder)
        return SimpleNamespace(losses=next(takes), seen={4: {}}, sums={}, run=lambda: None)

    nothing: Any = SimpleNamespace(restore=lambda: None)
    whole: Any = SimpleNamespace(losses=WHOLE, seen={4: {}}, sums={})
    ranks = Ranks(rank=0, size=1, device=torch.device(device))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(resumed, "TrainerTraining", training)
        verdict = resumed._compare(whole, nothing, nothing, ranks, Path("/nowhere"))
    return verdict, len(made)


def test_what_differs_without_a_stop_too_is_no_reason_to_refuse() -> None:
    assert compared([2.0, 1.0 + 1e-6], [], "cuda") == (guards.EXACT, 1)
    assert compared([2.0, 1.0005], [4.0, 3.0, 2.0, 0.9998], "cuda") == (guards.EXACT, 2)


@pytest.mark.parametrize(
    ("resumed_losses", "device"), [([2.0, 1.01], "cuda"), ([2.0], "cuda"), ([2.0, 1.0 + 1e-6], "cpu")]
)
def test_what_a_stop_changes_is_refused(resumed_losses: list[float], device: str) -> None:
    with pytest.raises(
        ChangesResultError, match="stopped after step 2 and resumed, the Trainer's loss at step"
    ):
        compared(resumed_losses, [4.0, 3.0, 2.0, 0.9998], device)
