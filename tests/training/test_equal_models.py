"""What tells that all ranks loaded the same model."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from saturn_airflow.launch.request import ChangesResultError
from saturn_airflow.model.errors import JobError
from saturn_airflow.training.loading import check_equal_everywhere
from saturn_airflow.training.own_step.own_loop import OwnStepTraining
from saturn_airflow.training.ranks import Ranks


class _Beside:
    """One of two ranks: the other has loaded ``other``, or is not heard."""

    size = 2

    def __init__(self, other: nn.Module | None = None) -> None:
        self._other = other
        self.value: Any = None

    def everyones(self, value: Any) -> list[Any]:
        self.value = value
        if self._other is None:
            return [value]
        alone = _Beside()
        check_equal_everywhere(self._other, cast(Ranks, alone))
        return [alone.value, value]


def _holding(*numbers: complex) -> nn.Module:
    model = nn.Module()
    model.weight = nn.Parameter(torch.tensor(numbers))
    return model


def test_weights_that_differ_in_their_imaginary_parts_alone_are_told() -> None:
    with pytest.raises(JobError, match="different weights on different ranks"):
        check_equal_everywhere(_holding(1 + 2j), cast(Ranks, _Beside(_holding(1 + 3j))))


def test_weights_of_one_sum_are_not_the_same() -> None:
    with pytest.raises(JobError, match="different weights on different ranks"):
        check_equal_everywhere(_holding(1.0, 2.0), cast(Ranks, _Beside(_holding(2.0, 1.0))))


@pytest.mark.parametrize("numbers", [(1 + 2j,), (math.nan, 1.0), ()])
def test_the_same_weights_are(numbers: tuple[complex, ...]) -> None:
    check_equal_everywhere(_holding(*numbers), cast(Ranks, _Beside(_holding(*numbers))))


def replicas(one: torch.Tensor, other: torch.Tensor) -> None:
    """Compare what two ranks hold after steps of a job's own."""
    told: list[Any] = []

    def everyones(value: Any) -> list[Any]:
        told.append(value)
        return list(told)

    for held in (one, other):
        training: Any = object.__new__(OwnStepTraining)
        training.state = SimpleNamespace(model_tensors=lambda held=held: {"model.queue": held})
        training.ranks = SimpleNamespace(size=2, everyones=everyones)
        training.request, training.step = SimpleNamespace(technique="ddp"), 1
        training._check_replicas()


@pytest.mark.parametrize("number", [0, 1, 4999])
def test_replicas_differ_where_one_number_does(number: int) -> None:
    held = torch.zeros(5000)
    other = held.clone()
    other[number] = 1e-3
    replicas(held, held.clone())
    with pytest.raises(ChangesResultError, match="'queue' is not the same on all devices"):
        replicas(held, other)


def test_replicas_that_are_no_numbers_or_complex_are_compared_by_their_bytes() -> None:
    nothing = torch.tensor([math.nan, math.inf])
    replicas(nothing, nothing.clone())
    with pytest.raises(ChangesResultError, match="'queue'"):
        replicas(torch.tensor([1 + 2j]), torch.tensor([1 + 3j]))
