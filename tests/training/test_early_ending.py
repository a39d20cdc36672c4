"""Early stopping, callbacks, and schedulers that ask for all steps."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_loop import job, launch, request, steps

from saturn_airflow.model.definition import Definition
from saturn_airflow.model.early_stopping import EarlyStopping
from saturn_airflow.model.errors import InvalidSweepError, JobError
from saturn_airflow.model.jobs import HParams, Job
from saturn_airflow.profiling.fingerprints import fingerprint
from saturn_airflow.tracking.events import Recorder
from saturn_airflow.training.optim.optimizers import scheduler_of
from saturn_airflow.training.plateau import Plateau

VALUES = st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, math.nan]), max_size=12)


@given(
    VALUES,
    st.integers(1, 4),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from(["min", "max"]),
    st.integers(0, 12),
)
def test_ends_where_nothing_became_better(
    values: list[float], patience: int, delta: float, mode: str, cut: int
) -> None:
    """Beside the plain rule: the first epoch that is ``patience`` after the last that was better."""
    sign = 1 if mode == "min" else -1
    best, last, ends = math.inf, -1, None
    for epoch, value in enumerate(values):
        if not math.isnan(value) and (best == math.inf or best - sign * value > delta):
            best, last = sign * value, epoch
        elif epoch - last >= patience:
            ends = epoch
            break
    rule = EarlyStopping(metric="f1", mode=mode, patience=patience, min_delta=delta)
    plateau, ended = Plateau(rule), None
    for epoch, value in enumerate(values):
        if epoch == cut:  # through a checkpoint
            seen, plateau = json.loads(json.dumps(plateau.to_dict())), Plateau(rule)
            plateau.go_on(seen)
        plateau.see(epoch, {"f1": value})
        if plateau.reason is not None:
            ended = epoch
            break
    assert ended == ends


def test_a_metric_that_is_not_there_is_said() -> None:
    with pytest.raises(JobError, match=r"'f1', which was not measured; there is acc"):
        Plateau(EarlyStopping(metric="f1", mode="max")).see(0, {"acc": 1.0, "eval_loss": None})


def test_what_another_rule_saw_does_not_count() -> None:
    rule, patient = EarlyStopping(patience=1), EarlyStopping(patience=5)
    seen = Plateau(rule)
    for epoch, value in enumerate([1.0, 2.0]):
        seen.see(epoch, {"eval_loss": value})
    kept = json.loads(json.dumps(seen.to_dict()))
    for other, ends in ((rule, True), (patient, False), (None, False)):
        plateau = Plateau(other)
        plateau.go_on(kept)
        assert (plateau.reason is not None) == ends
    plateau = Plateau(rule)
    plateau.go_on({key: value for key, value in kept.items() if key != "rule"})
    assert plateau.reason is not None, "earlier versions did not write the rule"


EVALUATED: dict[str, Any] = {"load_eval_dataloader": "loop_jobs:points"}
# With this much to win in an epoch nothing is better than the first.
STOPPING = {"patience": 2, "min_delta": 1e6}


@pytest.mark.ranks
def test_a_job_ends_early_and_stays_ended(tmp_path: Path) -> None:
    stopped = job({"epochs": 9, "batch_size": 8, "early_stopping": STOPPING}, **EVALUATED)
    for size, technique in ((1, "single"), (2, "ddp")):
        folder = tmp_path / technique
        (told,) = launch([request(stopped, folder, technique)], size)[0]
        result = told["result"]
        assert (result["status"], result["steps"]) == ("finished", 9)
        assert "ended early in epoch 2: eval_loss was" in result["reason"]
    (again,) = launch([request(stopped, tmp_path / "ddp")])[0]
    assert not steps(again)
    assert again["result"]["reason"] == result["reason"]
    assert again["result"]["status"] == "finished"
    # Halfway, it is not forgotten what was best.
    launch([request(stopped, tmp_path / "parts", batch_count=4)])
    (rest,) = launch([request(stopped, tmp_path / "parts")])[0]
    assert rest["result"]["reason"] == result["reason"]


NOTING = """
import json

def step(told):
    with open({path!r}, "a") as file:
        print(json.dumps({{"step": told["step"], "loss": told["loss"]}}), file=file)

def epoch(told):
    with open({path!r}, "a") as file:
        print(json.dumps({{**told, "metrics": None}}), file=file)
"""


@pytest.mark.ranks
def test_callbacks_are_told_by_the_first_device_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told_at = tmp_path / "told"
    (tmp_path / "noting.py").write_text(NOTING.format(path=str(told_at)))
    monkeypatch.syspath_prepend(str(tmp_path))
    callbacks = {"on_step": "noting:step", "on_epoch": "noting:epoch"}
    noting = job({"epochs": 2, "batch_size": 8}, **EVALUATED, **callbacks)
    (told,) = launch([request(noting, technique="ddp")], 2)[0]
    lines = [json.loads(line) for line in told_at.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 3, 4, 5, 6, 6]
    assert [line["loss"] for line in lines if "loss" in line] == steps(told)
    assert [line["epoch"] for line in lines if "epoch_loss" in line] == [0, 1]
    assert lines[-1]["eval_loss"] == told["result"]["eval_loss"]
    failing = job({"batch_size": 8}, on_epoch="loop_jobs:fail_epoch")
    (failed,) = launch([request(failing)])[0]
    assert failed["error"] == "JobError"
    assert "on_epoch 'loop_jobs:fail_epoch' raised ValueError" in failed["says"]


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)


def rates(scheduler: Any, count: int) -> list[float]:
    seen = []
    for _ in range(count):
        seen.append(scheduler.get_last_lr()[0])
        scheduler.optimizer.step()
        scheduler.step()
    return seen


def test_schedulers_that_ask_for_all_steps_get_them() -> None:
    from transformers import get_linear_schedule_with_warmup

    cycle = HParams(lr_scheduler="torch.optim.lr_scheduler:OneCycleLR", lr_scheduler_args={"max_lr": 0.5})
    linear = HParams(
        lr_scheduler="transformers:get_linear_schedule_with_warmup", lr_scheduler_args={"num_warmup_steps": 2}
    )
    expected = torch.optim.lr_scheduler.OneCycleLR(optimizer(), 0.5, total_steps=12)
    assert rates(scheduler_of(cycle, optimizer(), 12), 11) == rates(expected, 11)
    expected = get_linear_schedule_with_warmup(optimizer(), 2, 12)  # type: ignore[no-untyped-call]
    assert rates(scheduler_of(linear, optimizer(), 12), 12) == rates(expected, 12)
    said = HParams(
        lr_scheduler=cycle.lr_scheduler, lr_scheduler_args={"max_lr": 0.5, "epochs": 2, "steps_per_epoch": 3}
    )
    assert scheduler_of(said, optimizer(), 12).total_steps == 6  # type: ignore[union-attr]
    with pytest.raises(JobError, match=r"asks for total_steps, and the data has no length"):
        scheduler_of(cycle, optimizer(), None)


@pytest.mark.parametrize(
    "wrong",
    [
        {"patience": 0},
        {"min_delta": -1},
        {"metric": "loss"},
        {"metric": "f1"},
        {"mode": "least"},
        {"patienc": 1},
        "plateau",
    ],
)
def test_wrong_rules_are_refused(wrong: Any) -> None:
    with pytest.raises(InvalidSweepError, match="early_stopping"):
        HParams(early_stopping=wrong)


def test_a_rule_needs_its_metric() -> None:
    with pytest.raises(InvalidSweepError, match=r"early_stopping's metric is 'eval_loss', but"):
        job({"early_stopping": EarlyStopping()})
    job({"early_stopping": EarlyStopping(monitor="epoch_loss")})  # type: ignore[call-arg]


def test_a_rule_decides_the_result_and_not_the_speed() -> None:
    plain, stopping = job(**EVALUATED), job({"early_stopping": EarlyStopping()}, **EVALUATED)
    assert Job.from_dict(json.loads(json.dumps(stopping.to_dict()))) == stopping
    assert Definition.of(plain).hash != Definition.of(stopping).hash
    assert fingerprint(plain) == fingerprint(stopping)
    told = job(on_step="loop_jobs:fail_epoch")
    assert Definition.of(job()).hash == Definition.of(told).hash


def test_mlflow_is_told_why_a_job_ended() -> None:
    event = {"event": "end", "status": "finished", "reason": "ended early in epoch 2: ...", "result": {}}
    tags = [record["values"] for record in Recorder().records(event) if record["kind"] == "tags"]
    assert tags == [{"saturn.ended_early": "ended early in epoch 2: ..."}]
