"""Jobs that bring a ``Trainer``: they train as ``Trainer.train()`` does, to the last digit, killed or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_jobs

from saturn_airflow import HParams, InvalidSweepError, Job, JobError, Secret, library
from saturn_airflow.launch import handed_over
from saturn_airflow.launch.request import ChangesResultError, Measure, TrainRequest
from saturn_airflow.training.exports import load_exported
from saturn_airflow.training.guarding import guarded
from saturn_airflow.training.loop import train
from saturn_airflow.training.ranks import Ranks

pytestmark = pytest.mark.slow

Told = dict[str, Any]


def steps(told: Told) -> list[float]:
    return [event["loss"] for event in told["events"] if event["event"] == "step"]


def job(**model_args: Any) -> Job:
    return Job("bert", load_model="trainer_jobs:trainer", trainer=True, model_args=model_args)


def request(one: Job, folder: Path | str, **changes: Any) -> TrainRequest:
    settings = {"checkpoint_seconds": None, **changes}
    return TrainRequest(job=one, technique="single", folder=str(folder), **settings)


def alone(folder: Path, **model_args: Any) -> tuple[list[float], torch.nn.Module, list[float]]:
    """What ``Trainer.train()`` comes to without Saturn: the losses, the model, the evaluations' losses."""
    made = trainer_jobs.trainer(**model_args, output_dir=str(folder))
    losses: list[list[float]] = [[]]
    take = made.training_step

    def heard(*args: Any, **kwargs: Any) -> torch.Tensor:
        loss = take(*args, **kwargs)
        losses[-1].append(float(loss))
        if made.accelerator.sync_gradients:
            losses.append([])
        return loss

    made.training_step = heard  # type: ignore[method-assign]
    made.train()
    evaluations = [entry["eval_loss"] for entry in made.state.log_history if "eval_loss" in entry]
    return [float(torch.tensor(parts).sum()) for parts in losses if parts], made.model, evaluations  # type: ignore[return-value]


def run(*requests: TrainRequest) -> list[Told]:
    """Train each in turn, in this process: the result and the events, or the error."""
    told = []
    for one in requests:
        events: list[dict[str, Any]] = []
        here = Ranks(rank=0, size=1, device=torch.device("cpu"), _emit=events.append)
        try:
            told.append({"result": train(one, here), "events": events})
        except JobError as error:
            told.append({"says": str(error), "events": events})
    return told


def test_no_checkpoint_has_a_token_of_the_trainers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = "hf_so-secret-4711"
    handed = handed_over.HandedOver({("hub", "password"): token}, {}, (token,))
    monkeypatch.setattr(handed_over, "_kept", handed)
    hub = Secret("hub", "password")
    one = job(hub_token=hub, run_name=hub, num_train_epochs=1)
    asked = request(one, tmp_path, checkpoint_seconds=0.0)
    first, again = run(asked, asked)
    assert "result" in first, first
    assert "result" in again, again
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.name == "saturn.json" for path in written)
    assert [path for path in written if token.encode() in path.read_bytes()] == []


def evaluations(told: Told) -> list[float]:
    return [event["eval_loss"] for event in told["events"] if event["event"] == "eval"]


@pytest.mark.parametrize(
    "model_args",
    [
        {},
        {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 3},
        {"load_best_model_at_end": True, "save_strategy": "epoch", "patience": 1, "learning_rate": 0.1},
        {"data": "augmented"},
        {"data": "augmented", "gradient_accumulation_steps": 2},
    ],
    ids=["epochs", "accumulating", "best", "augmented", "augmented and accumulating"],
)
def test_trains_as_the_trainer_alone_killed_or_not(tmp_path: Path, model_args: dict[str, Any]) -> None:
    losses, model, expected = alone(tmp_path / "alone", **model_args)
    one = job(**model_args)
    whole, *parts = run(
        request(one, tmp_path / "whole"),
        # Stopped within an epoch, at the end of one, and just before one.
        *(request(one, tmp_path / "parts", batch_count=n, checkpoint_batches=2) for n in (2, 1, 2)),
    )
    assert whole["result"]["status"] == "finished"
    assert steps(whole) == losses
    assert evaluations(whole) == expected
    # Killed after its last checkpoint but one, and while it wrote its last.
    newest = sorted((tmp_path / "parts" / "checkpoints").glob("checkpoint-*"))[-1]
    (newest / "saturn.json").unlink()
    parts += run(request(one, tmp_path / "parts"))
    began = [next(event["step"] for event in part["events"] if event["event"] == "start") for part in parts]
    assert began[:3] == [0, 2, 3]
    assert began[3] < 5
    for begin, part in zip(began, parts, strict=True):
        assert steps(part) == losses[begin : begin + len(steps(part))]
    assert began[3] + len(steps(parts[3])) == len(losses)
    assert parts[3]["result"]["eval_loss"] == whole["result"]["eval_loss"] == expected[-1]
    assert parts[3]["result"]["epoch_loss"] == whole["result"]["epoch_loss"]
    for folder in ("whole", "parts"):
        trained = load_exported(tmp_path / folder / "model").state_dict()
        assert all(torch.equal(trained[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("function", ["changing", "counting_functions", "telling", "resetting", "of_images"])
def test_what_a_trainers_own_checkpoint_lacks_is_in_it(tmp_path: Path, function: str) -> None:
    one = Job("m", load_model=f"trainer_jobs:{function}", trainer=True, model_args={"eval_strategy": "no"})
    whole, *parts = run(
        request(one, tmp_path / "whole"),
        *(request(one, tmp_path / "parts", batch_count=count) for count in (4, 2, 2, None)),
    )
    assert [loss for part in parts for loss in steps(part)] == steps(whole)


@pytest.mark.parametrize("function", ["trainer", "counting_functions"])
def test_a_trial_measures_and_resumes(tmp_path: Path, function: str) -> None:
    measure = Measure(warmups=2, batches=6)
    here = Ranks(rank=0, size=1, device=torch.device("cpu"))
    one = Job("bert", load_model=f"trainer_jobs:{function}", trainer=True, model_args={"data": "caching"})
    told = guarded.measure(request(one, tmp_path, measure=measure), here)
    assert told["guard"] == "exact"
    assert told["seconds_per_batch"] > 0
    assert told["batches"] == 6
    assert told["batches_per_epoch"] == told["total_batches"] == 18
    assert told["evaluation_seconds"] > 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("model_args", "says"),
    [
        ({"data": "augmented", "dataloader_num_workers": 1}, "set dataloader_num_workers=0"),
        ({"data": "stream", "max_steps": 4}, "has no length"),
        (
            {"collator": "masking", "max_steps": 20},
            "data_collator.generator of the Trainer's data changes as",
        ),
        ({"data": "counting"}, "train_dataset.read of the Trainer's data changes as"),
        ({"data": "counting globally"}, "trainer_jobs.COUNTS['read'] of the Trainer's data changes as"),
        ({"callback": "forgetful"}, "the callback Forgetful changes its 'seen'"),
        ({"callback": "noting"}, "after step 4 state['heard'][1] is not what it was without the stop"),
        ({"train_sampling_strategy": "group_by_length"}, "in the order of a LengthGroupedSampler"),
        ({"dataloader_num_workers": 1, "dataloader_persistent_workers": True}, "can't be had: they go on"),
        ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches can't be had"),
        ({"auto_find_batch_size": True}, "TrainingArguments(auto_find_batch_size=True) can't be had"),
    ],
)
def test_what_could_not_be_resumed_is_refused_by_name(
    tmp_path: Path, model_args: dict[str, Any], says: str
) -> None:
    here = Ranks(rank=0, size=1, device=torch.device("cpu"))
    with pytest.raises((JobError, ChangesResultError)) as caught:
        guarded.measure(request(job(**model_args), tmp_path, measure=Measure(batches=3)), here)
    assert says in str(caught.value)


def test_a_trainer_that_saves_less_than_its_model_is_refused_by_name(tmp_path: Path) -> None:
    here = Ranks(rank=0, size=1, device=torch.device("cpu"))
    one = Job("bert", load_model="trainer_jobs:saving_few", trainer=True)
    with pytest.raises(ChangesResultError, match=r"the model's classifier\.seen is not what it was"):
        guarded.check(request(one, tmp_path), here)


def test_what_several_evaluations_measure_is_all_there(tmp_path: Path) -> None:
    def one(two: bool) -> Job:
        given = {"two": two, "num_train_epochs": 1}
        return Job("m", load_model="trainer_jobs:testing_too", trainer=True, model_args=given)

    alone, both = run(request(one(False), tmp_path / "one"), request(one(True), tmp_path / "two"))
    assert alone["result"]["eval_loss"] == evaluations(alone)[-1]
    assert alone["result"]["metrics"].keys() == {"accuracy"}
    assert both["result"]["metrics"].keys() == {"one_loss", "one_accuracy", "other_loss", "other_accuracy"}


def test_by_hand_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    one = job(output_dir=str(tmp_path / "own"))  # which a Trainer makes as it is made
    few, all_of_it = run(request(one, "", batch_count=4), request(one, ""))
    assert (len(steps(few)), few["result"]["status"]) == (4, "stopped")
    assert (len(steps(all_of_it)), all_of_it["result"]["status"]) == (18, "finished")
    assert not list((tmp_path / "own").iterdir())
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


def test_a_checkpoint_of_other_arguments_or_a_damaged_one_is_not_taken(tmp_path: Path) -> None:
    run(request(job(), tmp_path, batch_count=4, checkpoint_batches=2))
    manifest = tmp_path / "checkpoints" / "checkpoint-4" / "saturn.json"
    facts = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**facts, "arguments": {**facts["arguments"], "weight_decay": "0.5"}}))
    (told,) = run(request(job(), tmp_path))
    assert "weight_decay was 0.5 and is 0.0" in told["says"]
    (manifest.parent / "optimizer.pt").write_bytes(b"torn")
    (told,) = run(request(job(), tmp_path, batch_count=1))
    assert [e["step"] for e in told["events"] if e["event"] == "start"] == [2]
    assert "is damaged" in next(e["message"] for e in told["events"] if e["event"] == "warning")


def test_a_trainer_is_for_single_alone_and_leaves_nothing_to_the_job() -> None:
    assert "does not run the loop of a Trainer" in str(library.why_not(library.get("ddp"), job(), 2))
    assert library.why_not(library.get("single"), job(), 1) is None
    assert Job.from_dict(job().to_dict()) == job()
    job().check_references()
    with pytest.raises(InvalidSweepError, match="the hyper-parameter lr; say it in TrainingArguments"):
        Job("a", load_model="m:f", trainer=True, hparams=HParams(lr=0.1))
    with pytest.raises(InvalidSweepError, match="leaves nothing to loss_function"):
        Job("a", load_model="m:f", trainer=True, loss_function="m:g")
    with pytest.raises(InvalidSweepError, match="give load_dataloader"):
        Job("a", load_model="m:f")
