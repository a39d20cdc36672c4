"""What differs from one device by rounding alone is no reason to refuse a technique."""

from __future__ import annotations

import torch
from torch import nn

from saturn_airflow.training.guarding import comparing
from saturn_airflow.training.guarding.differences import Difference
from saturn_airflow.training.ranks import Ranks

ALONE = Ranks(rank=0, size=1, device=torch.device("cpu"))
# A bias before BatchNorm has a gradient of 0, of which rounding and Adam make a step in either direction.
FOUND = [Difference(what, "is off", 1) for what in ("a bias", "a mean", "another mean")]


def left_of(noise: list[set[str]]) -> tuple[list[str], int]:
    """What is no noise, and how many plain loops were taken to see that."""
    asked: list[int] = []

    def in_way(way: int) -> set[str]:
        asked.append(way)
        return noise[way]

    left = comparing.beyond_noise(FOUND, in_way, ALONE)
    assert asked == list(range(len(asked)))
    return [difference.what for difference in left], len(asked)


def test_what_rounding_makes_in_another_way_is_noise_too() -> None:
    assert left_of([{"a bias"}, {"a mean"}, {"another mean"}]) == ([], 3)
    assert left_of([{"a bias", "a mean", "another mean"}]) == ([], 1)


def test_what_no_rounding_makes_is_told() -> None:
    assert left_of([set()]) == (["a bias", "a mean", "another mean"], 1)
    assert left_of([{"a bias"}, {"a bias"}]) == (["a mean", "another mean"], 2)
    assert left_of([{"a bias"}, {"a mean"}, set()]) == (["another mean"], 3)


def test_each_way_is_another_one_and_by_last_digits_alone() -> None:
    models = [nn.Linear(7, 5) for _ in range(4)]
    for model, way in zip(models, (None, 0, 1, 2), strict=True):
        model.load_state_dict(models[0].state_dict())
        if way is not None:
            comparing.put_off_by_rounding(model, torch.float32, way)
    weights = [model.weight.detach() for model in models]
    for number, one in enumerate(weights):
        assert torch.allclose(one, weights[0], rtol=3e-7, atol=0)
        for other in weights[:number]:
            assert (one != other).float().mean() > 0.5
