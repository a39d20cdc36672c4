"""Models that the job's code refers to outside of what it is given."""

from __future__ import annotations

from typing import Any

import torch
from odd_models import Blocks
from torch import nn
from torch.nn.functional import cross_entropy

HELD: dict[str, Any] = {}


def held() -> nn.Module:
    """The loss finds the last one that was loaded."""
    HELD["model"] = Blocks()
    return HELD["model"]  # type: ignore[no-any-return]


def one_and_the_same() -> nn.Module:
    """However often it is loaded."""
    return HELD.setdefault("once", Blocks())  # type: ignore[no-any-return]


def penalized(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    penalty: torch.Tensor = sum(p.square().sum() for p in HELD["model"].parameters())
    return cross_entropy(outputs, targets) + 0.01 * penalty
