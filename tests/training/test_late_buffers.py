"""Buffers that there are only once a model is trained are in checkpoints, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import late_buffers
import pytest
import torch

from saturn_airflow import HParams, Job
from saturn_airflow.launch.request import TrainRequest
from saturn_airflow.training.checkpoints import read_weights
from saturn_airflow.training.guarding.guarded import check
from saturn_airflow.training.loop import train
from saturn_airflow.training.ranks import Ranks

EPOCHS = 2


@pytest.mark.parametrize("none", [True, False], ids=["as None before", "registered"])
@pytest.mark.parametrize("since", [1, 5], ids=["since the first step", "since the fifth"])
def test_a_job_goes_on_with_buffers_that_training_has_made(tmp_path: Path, since: int, none: bool) -> None:
    job = Job(
        "late",
        load_model="late_buffers:model",
        load_dataloader="late_buffers:data",
        loss_function="torch.nn.functional:mse_loss",
        model_args={"since": since, "none": none},
        hparams=HParams(precision="float64", lr=1e-2, epochs=EPOCHS),
    )
    losses: list[float] = []

    def note(event: dict[str, Any]) -> None:
        if event["event"] == "step":
            losses.append(event["loss"])

    ranks = Ranks(rank=0, size=1, device=torch.device("cpu"), _emit=note)
    request = TrainRequest(job=job, technique="single", checkpoint_seconds=None)
    assert check(request, ranks)["guard"] == "exact"
    losses.clear()
    for count in (2, 4, None):
        train(
            TrainRequest(
                job=job,
                technique="single",
                folder=str(tmp_path),
                batch_count=count,
                checkpoint_seconds=None,
            ),
            ranks,
        )
    model, expected = late_buffers.plain(since, none, EPOCHS)
    assert losses == pytest.approx(expected, rel=1e-12)
    found = read_weights(max(tmp_path.glob("checkpoints/step-*")))
    assert float(found["first.mean"]) == pytest.approx(float(model.first.mean), rel=1e-12)  # type: ignore[arg-type]
