"""Saves that fail, or that nobody ends: what training has by then is kept."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest
from test_loop import Told, job, launch, request, steps, try_each

from saturn_airflow.launch.failures import RanksFailedError
from saturn_airflow.launch.request import TrainRequest
from saturn_airflow.training import ranks as ranks_module
from saturn_airflow.training import tensor_files
from saturn_airflow.training.loop import train
from saturn_airflow.training.ranks import Ranks

pytestmark = pytest.mark.ranks


def test_a_full_disk_costs_a_checkpoint_not_the_training(tmp_path: Path) -> None:
    (told,) = ranks_module.launch(
        train_on_a_full_disk, request(job({"batches": 6}), tmp_path, checkpoint_batches=2), size=1
    )
    assert [e["step"] for e in told["events"] if e["event"] == "checkpoint"] == [2, 6]
    (warning,) = [e["message"] for e in told["events"] if e["event"] == "warning"]
    assert "No space left on device" in warning
    assert "free some space" in warning
    assert warning.endswith("; training goes on")


def train_on_a_full_disk(one: TrainRequest, ranks: Ranks) -> Told:
    """The second save meets a full disk."""

    write, calls = tensor_files.write_manifest, [0]

    def sometimes(*args: Any) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise OSError(28, "No space left on device")
        write(*args)

    tensor_files.write_manifest = sometimes  # type: ignore[assignment]
    (told,) = try_each([one], None, ranks)
    return told


def die_while_saving(one: TrainRequest, where: str, ranks: Ranks) -> None:
    """The process is gone in the middle of the second save, as if by SIGKILL or a power failure."""

    owner, name = (tensor_files, where) if where != "rename" else (Path, "rename")
    original, calls = getattr(owner, name), [0]

    def deadly(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2 and ranks.is_first:
            os._exit(9)
        return original(*args, **kwargs)

    setattr(owner, name, deadly)
    train(one, ranks)


@pytest.mark.parametrize("where", ["describe", "write_manifest", "rename"])
def test_whoever_dies_while_saving_loses_only_that_save(tmp_path: Path, where: str) -> None:
    one = request(job({"batches": 6}), tmp_path, checkpoint_batches=2)
    with pytest.raises(RanksFailedError):
        ranks_module.launch(die_while_saving, one, where, size=1)
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000002"]
    ((told,),) = launch([one])
    assert told["events"][0]["step"] == 2
    assert not [e for e in told["events"] if e["event"] == "warning"]
    assert told["result"]["status"] == "finished"
    assert not list((tmp_path / "checkpoints").glob(".saving-*"))


def train_saving_beside(one: TrainRequest, ranks: Ranks) -> list[Told]:
    """Save as on GPUs: while training goes on."""
    from saturn_airflow.training import checkpoints

    checkpoints.Checkpoints = functools.partial(checkpoints.Checkpoints, beside=True)  # type: ignore[assignment, misc]
    return try_each([one], None, ranks)


@pytest.mark.parametrize("technique", ["ddp", "fsdp"])
def test_saves_beside_training_are_whole(tmp_path: Path, technique: str) -> None:
    whole = job({"batches": 9, "precision": "float64"})
    start = request(whole, tmp_path, technique, checkpoint_batches=2, batch_count=5)
    (told,), _ = ranks_module.launch(train_saving_beside, start, size=2)
    saved = [e["step"] for e in told["events"] if e["event"] == "checkpoint"]
    assert saved == [2, 4, 5]
    (rest,), _ = launch([request(whole, tmp_path, technique)], size=2)
    (uninterrupted,), _ = launch([request(whole, tmp_path / "other", technique)], size=2)
    assert steps(told) + steps(rest) == steps(uninterrupted)
