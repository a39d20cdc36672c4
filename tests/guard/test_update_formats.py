"""Optimizers that compute in a lower number format than the model: their steps are as exact as that."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from saturn_airflow.training.guarding.differences import Comparison
from saturn_airflow.training.guarding.plain import Step
from saturn_airflow.training.guarding.samples import samples, singles
from saturn_airflow.training.optim.update_formats import noting_update_formats


def take_step(name: str) -> Step:
    """One step of an optimizer on a matrix of float64."""
    parameter = nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).double())
    before = singles({"weight": parameter})
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)([parameter], lr=1e-3)
    parameter.grad = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)).double()
    with noting_update_formats([optimizer]) as noted:
        optimizer.step()
    torch.ones(4, dtype=torch.float16) + 1  # nothing of the optimizer's
    gradients, weights = samples({"weight": parameter.grad}), singles({"weight": parameter})
    return Step(0.5, None, gradients, before, weights, {}, frozenset(), update_format=noted.lowest)


def off_by(step: Step, share: float) -> Step:
    """The same step with an update that is off by a ``share`` of it."""
    weights = {name: w + share * (w - step.before[name]) for name, w in step.weights.items()}
    return dataclasses.replace(step, weights=weights)


@pytest.mark.parametrize(
    ("optimizer", "share", "differs"),
    [("AdamW", 0.0, False), ("AdamW", 1e-2, True), ("Muon", 1e-2, False), ("Muon", 0.1, True)],
)
def test_an_update_is_as_exact_as_its_optimizer(optimizer: str, share: float, differs: bool) -> None:
    step = take_step(optimizer)
    found = Comparison(torch.float64).of(step, off_by(step, share))
    assert [d.what for d in found] == ["'weight' after step 1"] * differs


def test_what_comes_before_the_first_update_is_compared_in_the_models_format() -> None:
    step = take_step("Muon")
    comparison = Comparison(torch.float64)
    other = dataclasses.replace(step, loss=step.loss * (1 + 1e-6))
    assert [d.what for d in comparison.of(step, other)] == ["the loss of step 1"]
    assert not comparison.of(step, other), "weights are rounded by now"
    other = dataclasses.replace(step, loss=step.loss * (1 + 1e-2))
    assert [d.what for d in comparison.of(step, other)] == ["the loss of step 3"]


def test_a_step_that_raises_leaves_nothing_on() -> None:
    class Raising(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            raise ValueError("no")

    optimizer = Raising([nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match="no"), noting_update_formats([optimizer]) as noted:
        optimizer.step()
    torch.ones(2, dtype=torch.float16) * 2
    assert noted.lowest == torch.float64
