"""Jobs whose ``Trainer`` has its epochs, or its training, end early: they go on where they were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_jobs
from test_trainers import evaluations, request, run, steps

from saturn_airflow import Job
from saturn_airflow.training.exports import load_exported

pytestmark = pytest.mark.slow

#: Steps of 22 samples in batches of 4: six in an epoch, three epochs.
_ENDS = {
    "an epoch": {"epoch_at": 8},
    "an epoch at its end": {"epoch_at": 6},
    "training": {"all_at": 9},
    "training at an epoch's end": {"all_at": 12},
    "both": {"epoch_at": 3, "all_at": 10},
    "steps within an epoch": {"epoch_at": 3, "max_steps": 10},
    "accumulating": {"epoch_at": 2, "gradient_accumulation_steps": 2},
    "by epochs": {"data": "harder", "epoch_at": 9},
    "evaluating": {"epoch_at": 8, "eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True},
}


def cutting(model_args: dict[str, Any]) -> Job:
    return Job("bert", load_model="trainer_jobs:cutting", trainer=True, model_args=model_args)


def alone(folder: Path, model_args: dict[str, Any]) -> tuple[int, torch.nn.Module]:
    made = trainer_jobs.cutting(**model_args, output_dir=str(folder))
    made.train()
    return made.state.global_step, made.model  # type: ignore[return-value]


@pytest.mark.parametrize("model_args", _ENDS.values(), ids=_ENDS)
def test_what_ends_early_ends_there_wherever_training_was_stopped(
    tmp_path: Path, model_args: dict[str, Any]
) -> None:
    if "load_best_model_at_end" in model_args:
        model_args = {**model_args, "save_strategy": "steps", "save_steps": 3}
    one = cutting(model_args)
    last, model = alone(tmp_path / "alone", model_args)
    (whole,) = run(request(one, tmp_path / "whole"))
    assert whole["result"]["status"] == "finished"
    assert len(steps(whole)) == last
    trained = load_exported(tmp_path / "whole" / "model").state_dict()
    assert all(torch.equal(trained[name], value) for name, value in model.state_dict().items())
    # Stopped before it, at it, after it, and killed after a checkpoint in between.
    for stop in {2, model_args.get("epoch_at", 9), model_args.get("all_at", 9), last - 1}:
        folder = tmp_path / f"stopped-{stop}"
        first, again = run(request(one, folder, batch_count=stop, checkpoint_batches=1), request(one, folder))
        assert "result" in again, (stop, again.get("says"))
        if first["result"]["status"] != "finished":
            assert [*steps(first), *steps(again)] == steps(whole), stop
            assert [*evaluations(first), *evaluations(again)] == evaluations(whole), stop
        assert again["result"]["epoch_loss"] == whole["result"]["epoch_loss"], stop
        trained = load_exported(folder / "model").state_dict()
        assert all(torch.equal(trained[name], value) for name, value in model.state_dict().items()), stop


def test_a_checkpoint_says_by_its_number_what_earlier_versions_lack(tmp_path: Path) -> None:
    one = cutting({"epoch_at": 2, "num_train_epochs": 2})
    run(request(one, tmp_path, batch_count=3, checkpoint_batches=1))
    told = {
        path.parent.name: json.loads(path.read_text()) for path in tmp_path.glob("checkpoints/*/saturn.json")
    }
    assert told["checkpoint-3"]["format"] == 3
    assert told["checkpoint-3"]["position"] == {"epoch": 1, "batches": 1, "over": False}
