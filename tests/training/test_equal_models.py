"""What tells that all ranks loaded the same model."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch
from torch import nn

from saturn_airflow.model.errors import JobError
from saturn_airflow.training.loading import check_equal_everywhere
from saturn_airflow.training.own_step.own_loop import _digest
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
    assert _digest(torch.tensor([1 + 2j])) != _digest(torch.tensor([1 + 3j]))


def test_weights_of_one_sum_are_not_the_same() -> None:
    with pytest.raises(JobError, match="different weights on different ranks"):
        check_equal_everywhere(_holding(1.0, 2.0), cast(Ranks, _Beside(_holding(2.0, 1.0))))


@pytest.mark.parametrize("numbers", [(1 + 2j,), (math.nan, 1.0), ()])
def test_the_same_weights_are(numbers: tuple[complex, ...]) -> None:
    check_equal_everywhere(_holding(*numbers), cast(Ranks, _Beside(_holding(*numbers))))
