"""What differs from one device by rounding alone refuses no technique, and what is larger does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checking import job
from torch import nn

from saturn_airflow import library
from saturn_airflow.launch.request import ChangesResultError, TrainRequest
from saturn_airflow.library import BaseTechnique
from saturn_airflow.parallelism.parallel import Parallel
from saturn_airflow.training.guarding import comparing
from saturn_airflow.training.guarding.differences import Difference
from saturn_airflow.training.guarding.guarded import check
from saturn_airflow.training.nested import map_tensors
from saturn_airflow.training.ranks import Ranks

ALONE = Ranks(rank=0, size=1, device=torch.device("cpu"))
ADAM = "torch.optim:Adam"
# A bias before BatchNorm has a gradient of 0, of which rounding and Adam make a step in either direction.
FOUND = [Difference(what, "is off", 1, 2.0) for what in ("a bias", "a mean", "another mean")]


def left_of(noise: list[dict[str, float]]) -> tuple[list[str], int]:
    """What is no noise, and how many plain loops were taken to see that."""
    asked: list[int] = []

    def in_way(way: int) -> dict[str, float]:
        asked.append(way)
        return noise[way]

    left = comparing.beyond_noise(FOUND, in_way, ALONE)
    assert asked == list(range(len(asked)))
    return [difference.what for difference in left], len(asked)


def test_what_rounding_makes_in_another_way_is_noise_too() -> None:
    assert left_of([{"a bias": 1.0}, {"a mean": 1.0}, {"another mean": 1.0}]) == ([], 3)
    assert left_of([{}, {}, {"a bias": 1.0, "a mean": 1.0, "another mean": 1.0}]) == ([], 3)
    assert left_of([{"a bias": 1.0, "a mean": 0.5, "another mean": 3.0}]) == ([], 1)


def test_what_no_rounding_makes_is_told() -> None:
    assert left_of([{}, {}, {}]) == (["a bias", "a mean", "another mean"], 3)
    assert left_of([{"a bias": 1.0}, {"a bias": 1.0}, {}]) == (["a mean", "another mean"], 3)
    assert left_of([{"a bias": 1.0}, {"a mean": 1.0}, {}]) == (["another mean"], 3)


def test_what_is_much_larger_than_rounding_makes_it_is_told() -> None:
    small = {"a bias": 0.1, "a mean": 0.1, "another mean": 1.0}
    assert left_of([small, small, small]) == (["a bias", "a mean"], 3)
    assert left_of([small, {"a bias": 1.0}, small]) == (["a mean"], 3)


@pytest.mark.parametrize("size", [float("inf"), float("nan")])
def test_what_is_no_number_is_excused_by_the_like_alone(size: float) -> None:
    missing = [Difference("a gradient", "is missing", 2, size)]
    assert comparing.beyond_noise(missing, lambda way: {"a gradient": 1e9}, ALONE) == missing
    assert comparing.beyond_noise(missing, lambda way: comparing.sizes_of(missing), ALONE) == []


class Reversed(BaseTechnique):
    """It computes the samples of a batch in another order, which rounds otherwise."""

    def parallelize(self, model: nn.Module, ranks: Any, **parameters: Any) -> Any:
        class Turned(Parallel):
            def backward(self, objective: Any, batch: Any, *args: Any) -> Any:
                return super().backward(objective, map_tensors(lambda t: t.flip(0), batch), *args)

        return Turned(model, ranks)


class Skewed(BaseTechnique):
    """Right but for running means: in the first pass by ``first``; in all others they are of half a batch."""

    def parallelize(self, model: nn.Module, ranks: Any, first: float = 0.0, **parameters: Any) -> Any:
        passes = [0]

        def skew(norm: nn.Module, inputs: tuple[torch.Tensor], _: Any) -> None:
            passes[0] += 1
            x = inputs[0].detach()
            off = 0.1 * (x[: len(x) // 2].mean(0) - x.mean(0))
            norm.get_buffer("running_mean").data.add_(off if not first else first * (passes[0] == 1))

        model.get_submodule("1").register_forward_hook(skew)
        return Parallel(model, ranks)


def biased(seed: int = 0, width: int = 8) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 4))


def guarded(technique: type[BaseTechnique], model: dict[str, int], **parameters: Any) -> str:
    library.register("one", technique)
    here = "test_rounding:biased"
    one = job(load_model=here, model_args=model, hparams={"precision": "float32", "optimizer": ADAM})
    return str(check(TrainRequest(job=one, technique="one", parameters=parameters), ALONE)["guard"])


def test_a_bias_before_a_norm_may_wander(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether another order rounds otherwise depends on the processor and the weights: of some it does."""
    found: list[Difference] = []
    beyond_noise = comparing.beyond_noise

    def noting(differences: Any, *args: Any) -> Any:
        found.extend(differences)
        return beyond_noise(differences, *args)

    monkeypatch.setattr(comparing, "beyond_noise", noting)
    for seed in range(4):
        assert guarded(Reversed, {"seed": seed}) == "exact"
    assert "the buffer '1.running_mean' after later steps" in {d.what for d in found}


# The second is by less than what noise makes of that mean in later steps.
@pytest.mark.parametrize(("first", "when"), [(0.0, "(step 1|later steps)"), (1e-4, "step 1")])
def test_a_wrong_mean_beside_a_bias_that_wanders_is_refused(first: float, when: str) -> None:
    said = f"'1.running_mean' after {when} is off by"
    with pytest.raises(ChangesResultError, match=said):
        guarded(Skewed, {}, first=first)


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
