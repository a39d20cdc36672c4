"""What jobs share their trials."""

from __future__ import annotations

from typing import Any

import pytest

from saturn_airflow import HParams, Job
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.profiling.fingerprints import fingerprint


def job(**fields: Any) -> Job:
    usual: dict[str, Any] = {
        "name": "a",
        "load_model": "m:model",
        "load_dataloader": "d:data",
        "model_args": {"width": 8},
        "data_args": {"day": "2026-11-21", "samples": 100},
    }
    return Job(**{**usual, **fields})


def hparams(**values: Any) -> Job:
    return job(hparams=HParams(**values))


@pytest.mark.parametrize(
    "other",
    [
        job(name="b"),
        hparams(lr=0.5),
        hparams(seed=7),
        hparams(epochs=9),
        hparams(batches=9),
        hparams(optimizer_args={"weight_decay": 0.1}),
        job(load_eval_dataloader="d:eval"),
        job(techniques=["ddp"], nodes=["n"]),
    ],
)
def test_what_can_not_change_the_speed(other: Job) -> None:
    assert fingerprint(other) == fingerprint(job())


@pytest.mark.parametrize(
    "other",
    [
        job(load_model="m:other"),
        job(model_args={"width": 16}),
        job(data_args={"day": "2026-11-21", "samples": 200}),
        job(loss_function="m:loss"),
        hparams(batch_size=8),
        hparams(precision="bf16"),
        hparams(optimizer="torch.optim:SGD"),
        hparams(clip_grad_norm=1.0),
        hparams(lr_scheduler="torch.optim.lr_scheduler:ConstantLR"),
        hparams(compile=True),
        hparams(accumulate=2),
        job(data_args={"day": "2026-11-22", "samples": 100}),
    ],
)
def test_what_can(other: Job) -> None:
    assert fingerprint(other) != fingerprint(job())


def test_what_a_job_declares_neutral_does_not_count() -> None:
    today, tomorrow = (
        job(data_args={"day": day, "samples": 100}, neutral=["day"]) for day in ("2026-11-21", "2026-11-22")
    )
    assert fingerprint(today) == fingerprint(tomorrow)
    bigger = job(data_args={"day": "2026-11-21", "samples": 200}, neutral=["day"])
    assert fingerprint(today) != fingerprint(bigger)
    dropouts = (job(model_args={"width": 8, "dropout": p}, neutral=("dropout",)) for p in (0.1, 0.2))
    assert len(set(map(fingerprint, dropouts))) == 1
    groups = (
        job(hparams=HParams(parameter_groups=f), neutral=["parameter_groups"]) for f in ("m:one", "m:two")
    )
    assert len(set(map(fingerprint, groups))) == 1


def test_it_travels_with_the_job() -> None:
    neutral = job(neutral=["day"])
    assert Job.from_dict(neutral.to_dict()) == neutral


@pytest.mark.parametrize(
    ("neutral", "words"),
    [
        (["dya"], "neutral names 'dya', which is no hyper-parameter"),
        ("day", r"neutral is 'day'; give a list of names, such as \['day'\]"),
        (None, "neutral is None; give a list of names"),
    ],
)
def test_what_is_no_name_is_refused(neutral: Any, words: str) -> None:
    with pytest.raises(InvalidSweepError, match=words):
        job(neutral=neutral)
