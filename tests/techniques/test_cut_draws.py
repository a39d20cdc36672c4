"""What is drawn between layers that `tensor` cuts is independent on each rank, and alike everywhere else."""

from __future__ import annotations

import statistics
from pathlib import Path

import dropping
import pytest
import torch
from cells import Strategy, deviation, job, run
from cells import request as train_request

from saturn_airflow import library
from saturn_airflow.launch.request import DoesNotFit, TrainRequest
from saturn_airflow.model.jobs import HParams, Job
from saturn_airflow.training import ranks as ranks_module
from saturn_airflow.training import rng
from saturn_airflow.training.guarding.guarded import check
from saturn_airflow.training.ranks import Ranks

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

SINGLE, TENSOR = Strategy("single"), Strategy("tensor", 2)


def dropping_job(model: str, lr: float, samples: int, **args: object) -> Job:
    return job(
        load_model=f"dropping:{model}",
        model_args=args,
        load_dataloader="dropping:ones",
        data_args={"samples": samples},
        loss_function="dropping:output",
        hparams=HParams(precision="float64", lr=lr, batch_size=1, optimizer="torch.optim:SGD"),
    )


@pytest.mark.parametrize("how", ["units", "heads", "masked"])
def test_masks_between_cut_layers_have_the_variance_that_one_device_has(how: str, tmp_path: Path) -> None:
    one = dropping_job("even", 1e-12, 400, how=how)
    outcomes = run([(train_request(one, s, tmp_path / str(s)), s.devices) for s in (SINGLE, TENSOR)])
    assert not any(outcome.refused for outcome in outcomes)
    plain, cut = (statistics.variance(outcome.losses.values()) for outcome in outcomes)
    assert 0.7 < cut / plain < 1.4  # 2 where both ranks drop alike; of 400 each the ratio is 1 +- 0.1


def test_a_stopped_or_recomputed_training_draws_the_same_masks(tmp_path: Path) -> None:
    plain, again = (dropping_job("random", 1e-2, 8, again=again) for again in (False, True))
    asked = [
        train_request(plain, TENSOR, tmp_path / "whole"),
        train_request(again, TENSOR, tmp_path / "again"),
        train_request(plain, TENSOR, tmp_path / "parts", batch_count=3),
        train_request(plain, TENSOR, tmp_path / "parts"),
    ]
    whole, recomputed, before, after = run([(one, 2) for one in asked])
    assert {**before.losses, **after.losses} == whole.losses
    assert deviation(recomputed, whole) <= (1e-12, 1e-12)


def outputs_of(how: str, ranks: Ranks) -> tuple[list[float], str]:
    """The outputs of some passes on this rank, and the guard's verdict, or why there is none."""
    a_job = dropping_job("random", 1e-2, 8, how=how)
    model = dropping.random(how).double().train()
    parallel = library.get("tensor").parallelize(model, ranks)
    try:
        verdict = check(TrainRequest(job=a_job, technique="tensor"), ranks)["guard"]
        with parallel._draws.watched():
            model(torch.ones(1, 4, dtype=torch.float64))
    except DoesNotFit as reason:
        return [], str(reason)
    rng.seed(0)
    found = []
    for _ in range(4):
        found += parallel.call(torch.ones(1, 4, dtype=torch.float64)).flatten().tolist()
    return found, verdict


def test_what_is_whole_is_dropped_alike_on_all_ranks() -> None:
    one, other = ranks_module.launch(outputs_of, "units", size=2)
    assert one == other
    assert len(set(one[0])) == 16
    assert one[1] == "distribution"


def test_where_only_the_whole_is_dropped_masks_are_those_of_one_device() -> None:
    (_, verdict), _ = ranks_module.launch(outputs_of, "nothing", size=2)
    assert verdict == "exact"


def test_one_number_for_all_features_is_drawn_alike() -> None:
    one, other = ranks_module.launch(outputs_of, "all", size=2)
    assert one == other
    assert one[0]


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("whole", "dropout, between layers that are cut, for something that is whole"),
        ("samples", "bernoulli_, between layers that are cut, for something that is whole"),
        ("numpy", "by numpy or Python's random, between layers that are cut"),
        ("own", "by rand and a generator of the job's own, between layers that are cut"),
        ("channels", "dropout1d, between layers that are cut, not for each number by itself"),
    ],
)
def test_what_would_be_drawn_otherwise_is_refused(how: str, reason: str) -> None:
    (_, refused), _ = ranks_module.launch(outputs_of, how, size=2)
    assert reason in refused
