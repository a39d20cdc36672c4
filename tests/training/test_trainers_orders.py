"""Jobs whose ``Trainer`` has an order of batches of its own, or changes its data as it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_orders
from test_trainers import request, run, steps

from saturn_airflow import Job
from saturn_airflow.training.exports import load_exported

pytestmark = pytest.mark.slow


def job(how: str, batches: bool) -> Job:
    given = {"how": how, "batches": batches}
    return Job("bert", load_model="trainer_orders:ordering", trainer=True, model_args=given)


@pytest.mark.parametrize("batches", [False, True], ids=["sampler", "batch sampler"])
@pytest.mark.parametrize("how", ["torch", "numpy", "python", "generator", "times"])
def test_an_order_that_a_resumed_training_would_draw_anew_is_refused(
    tmp_path: Path, how: str, batches: bool
) -> None:
    (told,) = run(request(job(how, batches), tmp_path, batch_count=1))
    name = "DrawnBatches" if batches else "DrawnByEpoch"
    assert f"in the order of a {name}" in told["says"]
    assert "set_epoch" in told["says"]


@pytest.mark.parametrize("batches", [False, True], ids=["sampler", "batch sampler"])
def test_an_order_of_the_epoch_alone_is_the_same_after_a_resume(tmp_path: Path, batches: bool) -> None:
    made = trainer_orders.ordering("epoch", batches, str(tmp_path / "alone"))
    made.train()
    one = job("epoch", batches)
    (whole,) = run(request(one, tmp_path / "whole"))
    for stops in ((8,), (3, 3, 3)):
        folder = tmp_path / "-".join(map(str, stops))
        told = run(*(request(one, folder, batch_count=count) for count in stops), request(one, folder))
        assert [loss for part in told for loss in steps(part)] == steps(whole), stops
        trained = load_exported(folder / "model").state_dict()
        expected = made.model.state_dict()  # type: ignore[union-attr]
        assert all(torch.equal(trained[name], value) for name, value in expected.items()), stops


CHANGED = [
    *("data", "told data", "sampler", "collator", "module", "function", "hook", "gradient hook"),
    *("schedule", "loss", "label smoothing", "optimizer", "callback", "object"),
]
OFTEN = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
BEST = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}


@pytest.mark.parametrize(
    ("what", "arguments"),
    [*((what, {}) for what in CHANGED), ("data", OFTEN), ("hook", {**OFTEN, **BEST})],
)
def test_no_checkpoint_is_kept_that_would_lack_what_training_has_changed(
    tmp_path: Path, what: str, arguments: dict[str, Any]
) -> None:
    made = trainer_orders.changing(what, str(tmp_path / "alone"), **arguments)
    made.train()
    given = {"what": what, **arguments}
    one = Job("bert", load_model="trainer_orders:changing", trainer=True, model_args=given)
    folder = tmp_path / "stopped"
    # The last of these is stopped where its checkpoint would lack something, once more.
    told = run(*(request(one, folder, batch_count=count, checkpoint_batches=1) for count in (3, 4, 5)))
    assert all("result" in part for part in told), told
    warnings = [
        event["message"] for part in told[1:] for event in part["events"] if event["event"] == "warning"
    ]
    says = "no checkpoint is kept" if what == "object" else "which the checkpoints of a Trainer lack"
    assert any(says in message for message in warnings), warnings
    (last,) = run(request(one, folder))
    assert last["result"]["status"] == "finished"
    assert trainer_orders.LATE - 2 <= last["events"][0]["step"] <= trainer_orders.LATE + 1
    trained = load_exported(folder / "model").state_dict()
    expected = made.model.state_dict()  # type: ignore[union-attr]
    assert all(torch.equal(trained[name], value) for name, value in expected.items())


def test_data_that_count_how_often_they_are_told_of_epochs_are_refused(tmp_path: Path) -> None:
    one = Job("bert", load_model="trainer_orders:told_once", trainer=True)
    (told,) = run(request(one, tmp_path, batch_count=1))
    assert "train_dataset.times follows from more than the last set_epoch(epoch)" in told["says"]


@pytest.mark.parametrize("how", ["told data", "hidden states"])
def test_checkpoints_are_kept_where_nothing_else_has_changed(tmp_path: Path, how: str) -> None:
    """Data that follow from the epoch, and hooks that a library makes with the first step, are no change."""
    one = Job("bert", load_model="trainer_orders:unchanging", trainer=True, model_args={"how": how})
    (whole,) = run(request(one, tmp_path / "whole"))
    folder = tmp_path / "stopped"
    counts = (2, 7, 5)
    told = run(*(request(one, folder, batch_count=count) for count in counts), request(one, folder))
    assert [part["events"][0]["step"] for part in told] == [0, 2, 9, 14], told
    assert [loss for part in told for loss in steps(part)] == steps(whole)
