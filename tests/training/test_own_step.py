"""Training steps of a model's own, beside plain loops."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from pathlib import Path
from typing import Any
from unittest import mock

import own_step_jobs
import own_step_loops
import pytest
import torch
from test_loop import Told, launch, request, steps, try_each

from saturn_airflow import library
from saturn_airflow.launch.request import TrainRequest
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.jobs import HParams, Job
from saturn_airflow.training import ranks as ranks_module
from saturn_airflow.training.checkpoints import read_weights
from saturn_airflow.training.exports import export_model, load_exported
from saturn_airflow.training.loop import score
from saturn_airflow.training.ranks import Ranks

pytestmark = pytest.mark.ranks

EPOCHS = 3
MODELS = {
    "GAN": own_step_loops.gan,
    "Distillation": own_step_loops.distillation,
    "EMA": own_step_loops.ema,
    "MoCo": own_step_loops.moco,
    "Accumulating": own_step_loops.accumulating,
}


def job(model: str, hparams: dict[str, Any] | None = None, **fields: Any) -> Job:
    given: dict[str, Any] = {"load_dataloader": "own_step_jobs:rows", "own_step": True, **fields}
    return Job(
        model.lower(),
        load_model=f"own_step_jobs:{model}",
        hparams=HParams(**{"epochs": EPOCHS, "precision": "float64", **(hparams or {})}),
        **given,
    )


def off(folder: Path, model: torch.nn.Module) -> float:
    """How far the newest checkpoint's model is from ``model``."""
    newest = max((folder / "checkpoints").glob("step-*"))
    found = read_weights(newest)
    expected = model.state_dict()
    assert found.keys() <= expected.keys()
    return max(float((found[name] - expected[name]).abs().max()) for name in found)


def check(told: Told, folder: Path, name: str) -> None:
    model, losses = MODELS[name](EPOCHS)
    assert steps(told) == pytest.approx(losses[-len(steps(told)) :], abs=1e-12)
    assert off(folder, model) < 1e-11


@pytest.mark.parametrize("devices", [1, 2])
def test_trains_as_a_plain_loop_does(tmp_path: Path, devices: int) -> None:
    technique = "ddp" if devices > 1 else "single"
    requests = [request(job(name), tmp_path / name, technique) for name in MODELS]
    for name, told in zip(MODELS, launch(requests, devices)[0], strict=True):
        assert "error" not in told, told
        check(told, tmp_path / name, name)


def test_goes_on_from_a_checkpoint_under_another_technique(tmp_path: Path) -> None:
    def requests(technique: str) -> list[TrainRequest]:
        return [request(job(name), tmp_path / name, technique) for name in MODELS]

    # 6 batches an epoch: in the middle of one, and of what Accumulating accumulates.
    for told in launch(requests("ddp"), 2, stop_after=4)[0]:
        assert told["result"]["status"] == "stopped"
        assert told["result"]["steps"] == 4
    launch(requests("single"), 1, stop_after=4)
    for name, told in zip(MODELS, launch(requests("ddp"), 2)[0], strict=True):
        assert told["events"][0]["step"] == 8
        check(told, tmp_path / name, name)


def test_logs_and_evaluates_by_its_own_steps(tmp_path: Path) -> None:
    gan = job("GAN", load_eval_dataloader="own_step_jobs:rows")
    (alone,), (both,) = launch([request(gan)])[0], launch([request(gan, technique="ddp")], 2)[0]
    for told in (alone, both):
        assert {"c_loss"} == {name for e in told["events"] if e["event"] == "step" for name in e["metrics"]}
        assert told["result"]["metrics"].keys() == {"rows"}
    evals = [[e for e in told["events"] if e["event"] == "eval"] for told in (alone, both)]
    for one, other in zip(*evals, strict=True):
        assert one["eval_loss"] == pytest.approx(other["eval_loss"], abs=1e-12)
        assert one["metrics"] == pytest.approx(other["metrics"], abs=1e-12)


def test_what_devices_find_in_their_samples_is_no_matter(tmp_path: Path) -> None:
    names = ("Finding", "Unfilled", "Drawing")
    requests = [request(job(name), tmp_path / name, "ddp") for name in names]
    told = dict(zip(names, launch(requests, 2)[0], strict=True))
    assert {name: one["says"] for name, one in told.items() if "error" in one} == {}
    logged = [e["metrics"] for e in told["Finding"]["events"] if e["event"] == "step"]
    expected = []
    for x, _ in list(own_step_jobs.rows()) * EPOCHS:
        halves: dict[str, list[torch.Tensor]] = {}
        for half in (half for half in torch.tensor_split(x, 2) if len(half)):
            halves.setdefault("positive" if half[0, 0] > 0 else "negative", []).append(half)
        expected.append({sign: float(torch.cat(found).mean()) for sign, found in halves.items()})
    assert {len(one) for one in expected} == {1, 2}, "some steps find both, some one"
    assert [one.keys() for one in logged] == [one.keys() for one in expected]
    for one, other in zip(logged, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-12)


def score_each(requests: list[TrainRequest], ranks: Ranks) -> list[dict[str, Any]]:
    return [score(one, ranks) for one in requests]


def test_a_model_with_its_own_steps_is_scored() -> None:
    gan = job("GAN", load_eval_dataloader="own_step_jobs:rows")
    (scores,) = ranks_module.launch(score_each, [request(gan)], size=1)
    model, batches = own_step_jobs.GAN(), list(own_step_jobs.rows())
    with torch.no_grad():
        losses = [float(model.validation_step(batch, 0)["loss"]) * len(batch[0]) for batch in batches]
    assert scores[0]["eval_loss"] == pytest.approx(sum(losses) / own_step_jobs.SAMPLES, abs=1e-12)
    assert scores[0]["metrics"].keys() == {"rows"}


def test_follows_a_plateau(tmp_path: Path) -> None:
    following = job("Following", {"epochs": 8}, load_eval_dataloader="own_step_jobs:rows")
    whole = launch([request(following, tmp_path / "whole")])[0][0]
    rates = {e["lr"] for e in whole["events"] if e["event"] == "step"}
    assert len(rates) > 1
    launch([request(following, tmp_path / "parts", batch_count=30)])
    rest = launch([request(following, tmp_path / "parts", technique="ddp")], 2)[0][0]
    assert steps(rest) == pytest.approx(steps(whole)[30:], abs=1e-12)


def test_what_functions_of_a_schedule_remember_is_kept(tmp_path: Path) -> None:
    whole = launch([request(job("Scheduled"), tmp_path / "whole")])[0][0]
    launch([request(job("Scheduled"), tmp_path / "parts")], stop_after=4)
    rest = launch([request(job("Scheduled"), tmp_path / "parts")])[0][0]
    assert steps(rest) == pytest.approx(steps(whole)[4:], abs=1e-12)


@pytest.mark.parametrize(
    ("model", "fields", "says"),
    [
        ("Forgetful", {}, "'last' changes while it trains"),
        ("Hidden", {}, "'hidden' changes while it trains"),
        ("Thawing", {}, "training has given Adam other parameters than it was made with"),
        ("Regrouping", {}, "training has given Adam other parameters than it was made with"),
        ("Hooked", {}, "on_before_optimizer_step, which Saturn does not call"),
        ("Several", {}, "2 optimizers"),
        ("ClosingByItself", {}, "LBFGS needs a closure"),
        ("Stepless", {}, "no training_step"),
        ("MoCo", {"load_eval_dataloader": "own_step_jobs:rows"}, "no validation_step"),
        ("EMA", {"hparams": {"lr": 0.5}}, "lr is 0.5, which changes nothing"),
        ("GAN", {"hparams": {"clip_grad_norm": 1.0}}, "clip_grad_norm_ in training_step"),
    ],
)
def test_what_can_not_be_is_said(tmp_path: Path, model: str, fields: dict[str, Any], says: str) -> None:
    (told,) = launch([request(job(model, **fields), tmp_path)])[0]
    assert told["error"] == "JobError"
    assert says in told["says"]


def test_optimizers_with_closures_are_trained_on_one_device(tmp_path: Path) -> None:
    first = launch([request(job("Closing"), tmp_path / "one")], stop_after=4)[0][0]
    assert first["result"]["status"] == "stopped"
    model, losses = own_step_loops.by_itself(own_step_jobs.Closing(), EPOCHS)
    (told,) = launch([request(job("Closing"), tmp_path / "one")])[0]
    assert steps(told) == pytest.approx(losses[4:], abs=1e-12)
    assert off(tmp_path / "one", model) < 1e-11
    (told,) = launch([request(job("Closing"), tmp_path / "two", "ddp")], 2)[0]
    assert told["error"] == "DoesNotFit"
    assert "LBFGS steps by the losses that its closure returns" in told["says"]


def test_what_a_model_says_of_its_objects_is_kept(tmp_path: Path) -> None:
    launch([request(job("Scaling"), tmp_path, "ddp")], 2, stop_after=4)
    model, losses = own_step_loops.by_itself(own_step_jobs.Scaling(), EPOCHS)
    (told,) = launch([request(job("Scaling"), tmp_path)])[0]
    assert steps(told) == pytest.approx(losses[4:], abs=1e-12)
    assert off(tmp_path, model) < 1e-11


def test_techniques_that_take_the_step_apart_say_so() -> None:
    reasons = {
        name: library.why_not(library.get(name), job("GAN"), 2)
        for name in ("ddp", "fsdp", "tensor", "pipeline", "spill")
    }
    assert reasons.pop("ddp") is None
    assert all("training step of its own" in str(reason) for reason in reasons.values())


@pytest.mark.parametrize(
    "fields",
    [
        {"loss_function": "own_step_jobs:rows"},
        {"hparams": {"accumulate": 2}},
        {"hparams": {"compile": True}},
        {"batch_dim": 1},
        {"own_step": 1},
    ],
)
def test_what_can_not_be_is_refused_where_it_is_written(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidSweepError, match=r"own_step|of the job's own"):
        job("GAN", **fields)


def test_the_example_of_the_page_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "training_step.md").read_text()
    model = next(
        block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class GAN" in block
    )
    data = "from torch.utils.data import DataLoader, TensorDataset\n\n\ndef rows():\n"
    data += "    x = torch.randn(9, 64)\n    return DataLoader(TensorDataset(x, x), batch_size=4)\n"
    (tmp_path / "page_gan.py").write_text(f"{model}\n{data}")
    monkeypatch.syspath_prepend(str(tmp_path))
    gan = Job(
        "gan",
        load_model="page_gan:GAN",
        load_dataloader="page_gan:rows",
        load_eval_dataloader="page_gan:rows",
        own_step=True,
        model_args={"lr": 1e-3},
    )
    (told,) = launch([request(gan, tmp_path / "state")])[0]
    assert told["result"]["status"] == "finished"
    assert told["result"]["metrics"].keys() == {"critic_score"}
    exported = load_exported(export_model(told["result"]["checkpoint"], gan, tmp_path / "model"))
    assert exported(torch.zeros(2, 8)).shape == (2, 64)


def train_unrefused(requests: list[TrainRequest], ranks: Ranks) -> list[Told]:
    """Train each as if nothing of the step were refused, and nobody looked again."""

    def as_it_is(replicas: Any, parameter: torch.nn.Parameter) -> torch.Tensor:
        return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad

    instead: dict[str, Any] = {
        "training.job_training.spot_checks.can_differ": lambda *args, **kwargs: None,
        "training.own_step.own_loop.OwnStepTraining._check_replicas": lambda training: None,
        "training.own_step.user_step.needs_closure": lambda optimizer: False,
        "training.own_step.metric_objects.is_shared": lambda: False,
        "parallelism.own_step_replicas.OwnStepReplicas._gradient": as_it_is,
    }
    with contextlib.ExitStack() as stack:
        for place, what in instead.items():
            stack.enter_context(mock.patch(f"saturn_airflow.{place}", what))
        return try_each(requests, None, ranks)


def test_what_ranks_refuse_of_own_steps_would_be_another_result_or_a_lost_job(tmp_path: Path) -> None:
    local = job("MoCo", model_args={"whole": False})
    requests = [request(local, tmp_path, "ddp"), request(job("Sparse"), technique="ddp")]
    kept, sparse = ranks_module.launch(train_unrefused, requests, size=2)[0]
    # The queue has what the first rank found.
    model, _ = own_step_loops.moco(EPOCHS)
    assert kept["result"]["status"] == "finished"
    assert off(tmp_path, model) > 1e-2
    # The job's own code would be blamed, and no other technique tried.
    assert sparse["error"] == "JobError"
    (refused,) = launch([request(job("Sparse"), technique="ddp")], 2)[0]
    assert refused["error"] == "DoesNotFit"
    assert "sparse gradients" in refused["says"]


def test_a_backward_pass_that_some_devices_leave_out_is_refused() -> None:
    skipping = dataclasses.replace(job("Coupled"), load_model="unequal_steps:Skipping")
    (told,) = launch([request(skipping, technique="ddp")], 2)[0]
    assert told["error"] == "ChangesResultError"
    assert "more backward passes on one device than on another" in told["says"]


def test_closures_of_devices_that_know_other_losses_would_end_the_job() -> None:
    searching = request(job("Searching"), technique="ddp")
    (told,) = ranks_module.launch(train_unrefused, [searching], size=2, hang_seconds=30)[0]
    assert told["error"] == "ChangesResultError"
    assert "more backward passes on one device than on another" in told["says"]
