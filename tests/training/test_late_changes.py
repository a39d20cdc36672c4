"""Models that change what they are made of after a trial's steps: resumed before that, or told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import changing_late
import pytest
import torch
from running import spec_for

from saturn_airflow import HParams, Job, JobError
from saturn_airflow.launch import runs
from saturn_airflow.launch.request import TrainRequest
from saturn_airflow.model.definition import Definition
from saturn_airflow.training.loop import train
from saturn_airflow.training.ranks import Ranks

EPOCHS = 2


def job(what: str, epochs: int = EPOCHS) -> Job:
    return Job(
        "late",
        load_model="changing_late:model",
        load_dataloader="changing_late:data",
        loss_function="changing_late:loss",
        model_args={"what": what},
        hparams=HParams(precision="float64", lr=1e-2, epochs=epochs),
    )


def train_on(folder: Path, one: Job, **changes: Any) -> list[dict[str, Any]]:
    """What a training tells, which saves after each step."""
    settings: dict[str, Any] = {"checkpoint_seconds": None, "checkpoint_batches": 1, **changes}
    request = TrainRequest(job=one, technique="single", folder=str(folder), **settings)
    events: list[dict[str, Any]] = []
    train(request, Ranks(rank=0, size=1, device=torch.device("cpu"), _emit=events.append))
    return events


@pytest.mark.parametrize("what", ["", changing_late.MADE_IN_EACH_STEP, *changing_late.CHANGES])
@pytest.mark.filterwarnings("ignore:training has changed", "ignore:what training changes")
def test_a_job_goes_on_from_before_it_has_changed(tmp_path: Path, what: str) -> None:
    """Without changes, from where it was stopped: what each process makes in its first step is no change."""
    losses: dict[int, float] = {}
    warnings: list[str] = []
    begun = []
    for count in (2, 4, 2, None):  # the third and the last begin before the change once more
        told = train_on(tmp_path, job(what), batch_count=count)
        begun += [event["step"] for event in told if event["event"] == "start"]
        losses |= {event["step"]: event["loss"] for event in told if event["event"] == "step"}
        warnings += [event["message"] for event in told if event["event"] == "warning"]
    expected = changing_late.plain_losses(what, EPOCHS)
    assert [losses[step] for step in sorted(losses)] == pytest.approx(expected, rel=1e-12)
    before, changes = changing_late.LATE - 1, what in changing_late.CHANGES
    assert begun == ([0, 2, before, before] if changes else [0, 2, 6, 8])
    assert any("none is kept" in message for message in warnings) == changes


@pytest.mark.filterwarnings("ignore:training has changed", "ignore:what training changes")
def test_nothing_goes_on_from_the_end_of_what_has_changed(tmp_path: Path) -> None:
    train_on(tmp_path, job("hook"))
    with pytest.raises(JobError, match=r"lacks what training has changed .*the hooks of first"):
        train_on(tmp_path, job("hook", EPOCHS + 1), goes_on_from=Definition.of(job("hook")).hash)


@pytest.mark.parametrize("what", ["parameters", "pruned"])
@pytest.mark.filterwarnings("ignore:what training changes")
def test_parameters_that_no_optimizer_has_end_the_job(tmp_path: Path, what: str) -> None:
    with pytest.raises(JobError, match=f"other parameters .* by step {changing_late.LATE}: no optimizer"):
        train_on(tmp_path, job(what))


@pytest.mark.ranks
def test_a_difference_to_one_device_names_what_has_changed(tmp_path: Path) -> None:
    """The plain step has the model as it was loaded: the technique is not to blame."""
    found = runs.start(spec_for(tmp_path, job("hook"), "ddp", 2, path=(str(Path(__file__).parent),))).wait()
    assert found["status"] == "changes_result"
    assert "Training has changed the hooks of first (modules" in found["reason"]
