"""Metrics for the tests of how they are computed, right and wrong ones; the model gives predictions."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import cross_entropy


def error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs, targets).exp()


def crash(outputs: Any, targets: Any) -> float:
    raise ZeroDivisionError("no classes")


def each_sample(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.amax(-1)


def words(outputs: Any, targets: Any) -> str:
    return "good"


def nothing(outputs: Any, targets: Any) -> tuple[float, int]:
    return 0.0, 0


def makes_nothing() -> int:
    return 3


constant = 3


class Wants:
    def __init__(self, classes: int) -> None: ...


class Sum:
    """Sums up over all that it saw since it was reset."""

    def __init__(self) -> None:
        self.total = 100.0

    def reset(self) -> None:
        self.total = 0.0

    def update(self, predictions: torch.Tensor, targets: torch.Tensor) -> None:
        assert len(predictions) == len(targets)
        self.total += float(targets.sum())

    def compute(self) -> float:
        return self.total


shared = Sum()
