"""What training takes away from a model, or changes that torch does not save, is so where a job goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import taking_away
import torch
from running import spec_for

from saturn_airflow import HParams, Job
from saturn_airflow.launch import runs
from saturn_airflow.launch.request import TrainRequest
from saturn_airflow.training.exports import export_model, load_exported
from saturn_airflow.training.loop import train
from saturn_airflow.training.ranks import Ranks

EPOCHS = 2
HERE = str(Path(__file__).parent)


def job(kind: str) -> Job:
    return Job(
        "takes",
        load_model="taking_away:model",
        load_dataloader="taking_away:data",
        loss_function="torch.nn.functional:mse_loss",
        model_args={"kind": kind},
        hparams=HParams(precision="float64", lr=1e-2, epochs=EPOCHS),
    )


@pytest.mark.parametrize("kind", taking_away.KINDS)
@pytest.mark.filterwarnings("error:what training changes")
def test_a_job_goes_on_without_what_is_gone(tmp_path: Path, kind: str) -> None:
    losses: list[float] = []

    def note(event: dict[str, Any]) -> None:
        if event["event"] == "step":
            losses.append(event["loss"])

    ranks = Ranks(rank=0, size=1, device=torch.device("cpu"), _emit=note)
    for count in (2, 4, 2, None):
        settings = {"folder": str(tmp_path), "batch_count": count, "checkpoint_seconds": None}
        train(TrainRequest(job=job(kind), technique="single", **settings), ranks)  # type: ignore[arg-type]
    model, expected = taking_away.plain(kind, EPOCHS)
    assert losses == pytest.approx(expected, rel=1e-12)
    last = max(tmp_path.glob("checkpoints/step-*"))
    exported = load_exported(export_model(last, job(kind), tmp_path / "exported"))
    saved = [key for key in model.state_dict() if key == "factor"]
    assert [key for key in exported.state_dict() if key == "factor"] == saved
    if "buffer" in kind and "passing" not in kind:
        assert getattr(exported, "factor", "gone") == getattr(model, "factor", "gone")


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["attribute that becomes a buffer", "buffer", "passing buffer"])
def test_ranks_agree_with_one_device_that_it_is(tmp_path: Path, kind: str) -> None:
    """Their last step is compared with one of the model as it was loaded."""
    run = runs.start(spec_for(tmp_path, job(kind), "ddp", 2, path=(HERE,)))
    losses = [event["loss"] for event in run.events() if event["event"] == "step"]
    assert run.end is not None
    assert run.end["status"] == "finished", run.end
    assert losses == pytest.approx(taking_away.plain(kind, EPOCHS)[1], rel=1e-12)
