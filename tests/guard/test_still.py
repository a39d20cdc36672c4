"""While a technique is compared nothing is random, whichever way a model draws it."""

from __future__ import annotations

import random
from collections.abc import Callable
from random import random as drawn_by_name
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import uniform as uniform_by_name
from torch import randint as randint_by_name
from torch import randn as randn_by_name
from torch.distributions import Bernoulli, Beta, Binomial, Categorical, Cauchy, Gamma, Normal, Poisson
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention

from saturn_airflow.training.guarding.randomness import each_pass_anew, without_randomness

WEIGHTS = torch.tensor([[0.1, 0.6, 0.3], [0.5, 0.2, 0.3]])

DRAWN: dict[str, Callable[[], Any]] = {
    "rand": lambda: torch.rand(3),
    "randn, by name": lambda: randn_by_name(3, 2, dtype=torch.float64),
    "randint, imported": lambda: randint_by_name(0, 1000, (3,)),
    "randn": lambda: torch.randn(3, 2),
    "randn_like": lambda: torch.randn_like(WEIGHTS),
    "randint": lambda: torch.randint(0, 1000, (3,)),
    "randint, up to": lambda: torch.randint(1000, (3,)),
    "randint, by names": lambda: torch.randint(high=1000, size=(3,), dtype=torch.int32),
    "randint_like": lambda: torch.randint_like(WEIGHTS, 0, 1000),
    "randperm": lambda: torch.randperm(50),
    "multinomial": lambda: torch.multinomial(WEIGHTS.repeat(20, 1), 2),
    "multinomial with replacement": lambda: WEIGHTS.repeat(20, 1).multinomial(4, replacement=True),
    "normal": lambda: torch.normal(torch.zeros(3), torch.ones(3)),
    "uniform_": lambda: torch.empty(3).uniform_(2, 4),
    "a normal distribution": lambda: Normal(torch.zeros(3), torch.ones(3)).rsample(),
    "categories": lambda: Categorical(WEIGHTS.repeat(20, 1)).sample(),  # type: ignore[no-untyped-call]
    "coins": lambda: Bernoulli(WEIGHTS.repeat(20, 1)).sample(),  # type: ignore[no-untyped-call]
    "slopes of rectified units": lambda: functional.rrelu(-torch.ones(9), training=True),
    "slopes in place": lambda: functional.rrelu(-torch.ones(9), training=True, inplace=True),
    "log_normal_": lambda: torch.empty(3).log_normal_(),
    "geometric_": lambda: torch.empty(9).geometric_(0.1),
    "a Cauchy distribution": lambda: Cauchy(torch.zeros(3), torch.ones(3)).rsample(),
    "a Beta distribution": lambda: Beta(torch.ones(3), torch.ones(3)).rsample(),
    "a Gamma distribution": lambda: Gamma(torch.ones(3), torch.ones(3)).rsample(),
    "counts": lambda: Poisson(torch.full((9,), 5.0)).sample(),  # type: ignore[no-untyped-call]
    "counts of coins": lambda: Binomial(9, torch.full((9,), 0.5)).sample(),  # type: ignore[no-untyped-call]
    "numpy's lognormal": lambda: np.random.lognormal(size=3),
    "numpy's permutation": lambda: torch.as_tensor(np.random.permutation(50)),
    "numpy's beta": lambda: np.random.beta(2, 2),
    "Python's betavariate": lambda: random.betavariate(2, 2),
    "Python's weibullvariate": lambda: random.weibullvariate(2, 2),
}


@pytest.mark.parametrize("how", DRAWN)
def test_what_is_drawn_is_the_same_each_time(how: str) -> None:
    torch.manual_seed(1)
    example = torch.as_tensor(DRAWN[how]())
    own = {name: getattr(torch, name) for name in ("randint", "randperm", "multinomial")}
    with without_randomness() as what:
        assert not what.drew
        first, second = torch.as_tensor(DRAWN[how]()), torch.as_tensor(DRAWN[how]())
        assert what.drew
    assert torch.equal(first, second)
    assert (first.shape, first.dtype) == (example.shape, example.dtype)
    assert all(getattr(torch, name) is function for name, function in own.items())
    assert any(not torch.equal(torch.as_tensor(DRAWN[how]()), example) for _ in range(9)), (
        "it is random again"
    )


@pytest.mark.parametrize("draw", [drawn_by_name, uniform_by_name])
def test_functions_that_were_imported_by_name_draw_the_same_in_each_pass(draw: Callable[[], float]) -> None:
    before = random.getstate()
    with without_randomness() as what:
        passes: list[list[float]] = []
        for _ in range(2):
            with each_pass_anew():
                assert not what.drew or passes
                passes.append([draw(), draw()])
    assert what.drew
    assert passes[0] == passes[1]
    assert random.getstate() == before
    with each_pass_anew():
        assert [draw(), draw()] != passes[0]


def test_a_permutation_moves_what_it_mixes() -> None:
    with without_randomness():
        assert torch.equal(torch.randperm(5).sort().values, torch.arange(5))
        assert torch.randperm(5).tolist() != list(range(5))


DROPS: dict[str, Callable[[torch.Tensor, float, bool], torch.Tensor]] = {
    "a function": functional.dropout,
    "of channels": functional.dropout2d,
    "alpha": functional.alpha_dropout,
    "in place": lambda x, p, training: functional.dropout(x.clone(), p, training, inplace=True),
    "in attention": lambda x, p, training: functional.scaled_dot_product_attention(
        x, x, x, dropout_p=p if training else 0.0
    ),
    "in attention, by name": lambda x, p, training: scaled_dot_product_attention(
        x, x, x, dropout_p=p if training else 0.0
    ),
    "between layers": lambda x, p, training: layers(p).train(training)(x[0])[0],
    "slopes": lambda x, p, training: functional.rrelu(-x, 0.1, 0.1 + p, training),
}


LAYERS = torch.nn.LSTM(4, 4, num_layers=2)


def layers(p: float) -> torch.nn.Module:
    LAYERS.dropout = p
    return LAYERS


@pytest.mark.parametrize("how", DROPS)
def test_it_shows_whether_a_dropout_is_there_and_how_much_it_drops(how: str) -> None:
    """Else a technique could train without, or evaluate with it."""
    x = torch.ones(1, 2, 3, 4)
    with without_randomness():
        little, much, again = (DROPS[how](x, p, True) for p in (0.1, 0.5, 0.1))
        evaluated = DROPS[how](x, 0.1, False)
    assert torch.equal(little, again)
    assert not torch.equal(little, evaluated)
    assert how == "slopes" or not torch.equal(little, much)
    assert how != "slopes" or torch.equal(little, much), "the least slope is that of both"
    assert torch.allclose(little, evaluated, rtol=0.5)
