"""Data that became more or fewer between two tries of a job: no place in the old ones is one in the new."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from test_loop import job, launch, request, steps

from saturn_airflow.launch.request import TrainRequest
from saturn_airflow.model.definition import Definition
from saturn_airflow.model.jobs import HParams, Job

pytestmark = pytest.mark.ranks

BEFORE = 40  # 10 batches


def growing(file: Path, loader: str = "table", **hparams: Any) -> Job:
    file.write_text(str(BEFORE))
    return job(
        {"epochs": 3, **hparams}, load_dataloader=f"growing_jobs:{loader}", data_args={"file": str(file)}
    )


def begun(asked: TrainRequest, batches: int) -> TrainRequest:
    """Trained so far; what the next try asks for."""
    ((told,),) = launch([dataclasses.replace(asked, batch_count=batches)])
    assert told["result"]["status"] == "stopped"
    return asked


@pytest.mark.parametrize("samples", [20, 39, 41, 80])
def test_the_epoch_begins_anew(tmp_path: Path, samples: int) -> None:
    file = tmp_path / "samples"
    again = begun(request(growing(file), tmp_path), batches=17)
    file.write_text(str(samples))
    ((told, after),) = launch([dataclasses.replace(again, batch_count=3), again])
    (warning,) = [event["message"] for event in told["events"] if event["event"] == "warning"]
    batches = -(-samples // 4)
    assert f"had 10 batches of 40 samples, and has {batches} batches of {samples} samples" in warning
    assert "Epoch 1, of which 7 batches were trained, can't go on, and begins anew" in warning
    # It is told once, and whoever goes on after that goes on where it is.
    assert not [event for event in after["events"] if event["event"] == "warning"]
    assert told["events"][0]["event"] == "warning"
    whole = 17 + 2 * batches
    assert len(steps(told)) + len(steps(after)) == 2 * batches
    assert after["result"]["status"] == "finished"
    assert after["result"]["steps"] == after["result"]["total_batches"] == whole
    assert [event["epoch"] for event in after["events"] if event["event"] == "step"][-1] == 2


def test_between_two_epochs_nothing_begins_anew(tmp_path: Path) -> None:
    file = tmp_path / "samples"
    again = begun(request(growing(file), tmp_path), batches=10)
    file.write_text("80")
    ((told,),) = launch([again])
    assert not [event for event in told["events"] if event["event"] == "warning"]
    assert told["result"]["steps"] == told["result"]["total_batches"] == 10 + 2 * 20


def test_other_samples_of_the_same_number_are_told_of(tmp_path: Path) -> None:
    again = begun(request(growing(tmp_path / "samples", "unseeded"), tmp_path), batches=17)
    ((told,),) = launch([again])
    (warning,) = [event for event in told["events"] if event["event"] == "warning"]
    assert "samples are others than those that" in warning["message"]
    assert warning["mixed"]
    assert len(steps(told)) == 30 - 17


def test_a_stream_that_ends_before_where_training_stood_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "samples"
    again = begun(request(growing(file, "stream"), tmp_path), batches=17)
    file.write_text("20")
    ((told,),) = launch([again])
    assert told["error"] == "JobError"
    assert "epoch 1 ends after batch 5, and 7 were trained; start the job from scratch" in told["says"]


@pytest.mark.parametrize("batch_size", [2, 8])
def test_a_job_goes_on_with_batches_of_another_size_if_asked_to(tmp_path: Path, batch_size: int) -> None:
    was = growing(tmp_path / "samples", batch_size=4)
    begun(request(was, tmp_path), batches=17)
    now = growing(tmp_path / "samples", batch_size=batch_size)
    ((told,),) = launch([request(now, tmp_path, goes_on_from=Definition.of(was).hash)])
    assert told["result"]["status"] == "finished"
    assert told["result"]["steps"] == 17 + 2 * BEFORE // batch_size


def test_no_optimizer_goes_on_with_the_state_of_another(tmp_path: Path) -> None:
    was = growing(tmp_path / "samples", optimizer="torch.optim:SGD", optimizer_args={"momentum": 0.9})
    begun(request(was, tmp_path), batches=5)
    now = growing(tmp_path / "samples", optimizer="torch.optim:Adam")
    ((told,),) = launch([request(now, tmp_path, goes_on_from=Definition.of(was).hash)])
    assert told["error"] == "CheckpointError"
    assert 'hparams.optimizer was "torch.optim:SGD" and is "torch.optim:Adam"' in told["says"]
    assert "start the job from scratch" in told["says"]


def test_what_a_step_of_ones_own_has_measured_of_an_epoch_can_not_be_taken_back(tmp_path: Path) -> None:
    was = Job(
        "gan",
        load_model="own_step_jobs:GAN",
        load_dataloader="own_step_jobs:rows",
        own_step=True,
        data_args={"batch_size": 4},
        hparams=HParams(epochs=3, precision="float64"),
    )
    begun(request(was, tmp_path), batches=8)
    now = dataclasses.replace(was, data_args={"batch_size": 3})
    ((told,),) = launch([request(now, tmp_path, goes_on_from=Definition.of(was).hash)])
    assert told["error"] == "JobError"
    assert "Epoch 1, of which 2 batches were trained, can't go on, nor begin anew" in told["says"]
