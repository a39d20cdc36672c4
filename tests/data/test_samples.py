"""Samples of jobs: within their ranges, the same for a seed, and beginning as fewer of them do."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from saturn_airflow import InvalidSweepError, Job, loguniform, randint, sample, uniform


def job(name: str = "a-{sample}") -> Job:
    return Job(name, load_model="m:f", load_dataloader="m:g", model_args={"depth": 1})


RANGES: dict[str, Any] = {
    "lr": loguniform(1e-5, 1e-2),
    "batch_size": [16, 32],
    "depth": randint(1, 5),
    "optimizer_args.weight_decay": uniform(0, 0.1),
    "optimizer_args.eps": stats.loguniform(1e-9, 1e-7),
    "seed": stats.randint(1, 4),
}


@settings(deadline=None, max_examples=10)
@given(fewer=st.integers(1, 9), more=st.integers(0, 9), seed=st.integers(0, 2**31))
@pytest.mark.parametrize("method", ["random", "sobol"])
def test_more_samples_begin_with_the_same_and_all_are_within_their_ranges(
    method: str, fewer: Any, more: Any, seed: Any
) -> None:
    jobs = sample(job(), fewer + more, RANGES, method=method, seed=seed)
    assert jobs[:fewer] == sample(job(), fewer, RANGES, method=method, seed=seed)
    assert [j.name for j in jobs] == [f"a-{i}" for i in range(fewer + more)]
    for drawn in jobs:
        assert 1e-5 <= drawn.hparams.lr <= 1e-2
        assert drawn.hparams.batch_size in (16, 32)
        assert drawn.model_args["depth"] in (1, 2, 3, 4)
        assert drawn.hparams.seed in (1, 2, 3)
        assert 0 <= drawn.hparams.optimizer_args["weight_decay"] < 0.1
        assert 1e-9 <= drawn.hparams.optimizer_args["eps"] <= 1e-7
        assert Job.from_dict(drawn.to_dict()) == drawn


def test_a_seed_draws_always_the_same() -> None:
    """So that a DAG file means the same jobs whenever, and wherever, it is parsed."""
    drawn = sample(job("a-{lr:.3e}-{depth}"), 3, lr=loguniform(1e-5, 1e-2), depth=randint(1, 5), seed=7)
    assert [j.name for j in drawn] == ["a-9.365e-05-1", "a-8.970e-04-1", "a-4.052e-04-2"]
    assert sample(job(), 3, lr=[1, 2, 3], seed=1) != sample(job(), 3, lr=[1, 2, 3], seed=2)


def test_sobols_points_are_spread_over_all_ranges() -> None:
    jobs = sample(job(), 16, lr=loguniform(1e-4, 1), depth=randint(0, 4), method="sobol")
    decades = [math.floor(math.log10(j.hparams.lr)) for j in jobs]
    assert sorted(decades) == sorted([-4, -3, -2, -1] * 4)
    assert sorted(j.model_args["depth"] for j in jobs) == sorted([0, 1, 2, 3] * 4)


def test_no_two_jobs_have_the_same_values() -> None:
    jobs = sample(job(), 6, depth=[1, 2, 3], batch_size=[8, 16])
    assert len({(j.model_args["depth"], j.hparams.batch_size) for j in jobs}) == 6
    with pytest.raises(InvalidSweepError, match="7 jobs were asked for, and 6 different ones found"):
        sample(job(), 7, depth=[1, 2, 3], batch_size=[8, 16])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sample(job("a"), 2, lr=[1, 2]), "name the job 'a-{sample}'"),
        (lambda: sample(job(), 0, lr=[1, 2]), "n is 0; it must be a whole number of at least 1"),
        (lambda: sample(job(), 2, lr=[1], seed=[0, 1]), "write {'seed': [0, 1]}"),  # type: ignore[arg-type]
        (lambda: sample(job(), 2, lr=[1], method="grid"), "choose one of random, sobol"),
        (lambda: sample(job(), 2), "nothing varies"),
        (lambda: sample(job(), 2, lr=0.1), "lr is 0.1; give a list of values, uniform"),
        (lambda: sample(job(), 2, width=[1]), "'width' is no hyper-parameter"),
        (lambda: sample(job(), 2, lr=uniform(-3, -2)), "lr is -2"),
        (lambda: sample([job()], 2, lr=[1]), "give one Job"),  # type: ignore[arg-type]
        (lambda: loguniform(0, 1), "low must be above 0"),
        (lambda: uniform(2, 1), "low must be below high"),
        (lambda: uniform("1", 2), "give two numbers"),  # type: ignore[arg-type]
        (lambda: randint(1, 2.5), "give whole numbers"),  # type: ignore[arg-type]
    ],
)
def test_samples_that_cannot_be(call: Any, message: Any) -> None:
    with pytest.raises(InvalidSweepError) as caught:
        call()
    assert message in str(caught.value)
