"""The training loop: what it reports, when it stops and saves, and how it names mistakes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import loop_jobs
import pytest
import torch

from saturn_airflow.launch.request import DoesNotFit, Measure, TrainRequest
from saturn_airflow.model.errors import JobError
from saturn_airflow.model.jobs import HParams, Job
from saturn_airflow.training import precision, shared_memory
from saturn_airflow.training import ranks as ranks_module
from saturn_airflow.training.batches import Cut, Position
from saturn_airflow.training.checkpoints import read_weights
from saturn_airflow.training.guarding.guarded import check
from saturn_airflow.training.load_data import load_data
from saturn_airflow.training.loading import load_model
from saturn_airflow.training.loop import score, train
from saturn_airflow.training.losses.objective import Objective
from saturn_airflow.training.ranks import Ranks

pytestmark = pytest.mark.ranks

Told = dict[str, Any]


def job(hparams: dict[str, Any] | None = None, **fields: Any) -> Job:
    given = {
        "load_model": "loop_jobs:line",
        "load_dataloader": "loop_jobs:points",
        "loss_function": "loop_jobs:loss",
    }
    return Job("j", hparams=HParams(**{"lr": 0.1, **(hparams or {})}), **{**given, **fields})


def request(a_job: Job, folder: Path | str = "", technique: str = "single", **changes: Any) -> TrainRequest:
    defaults: dict[str, Any] = {"checkpoint_seconds": None}
    return TrainRequest(job=a_job, technique=technique, folder=str(folder), **{**defaults, **changes})


def try_each(requests: list[TrainRequest], stop_after: int | None, ranks: Ranks) -> list[Told]:
    """Train each in turn: the result and the events, or the error."""
    told = []
    for one in requests:
        events: list[dict[str, Any]] = []
        asked = [0]

        def stop_requested(asked: list[int] = asked) -> bool:
            asked[0] += 1
            # Only the last rank hears of it: the others must stop at the same step.
            return stop_after is not None and ranks.rank == ranks.size - 1 and asked[0] >= stop_after

        watched = dataclasses.replace(ranks, _emit=events.append, _stop_requested=stop_requested)
        try:
            told.append({"result": train(one, watched), "events": events})
        except (JobError, DoesNotFit) as error:
            told.append({"error": type(error).__name__, "says": str(error), "events": events})
    return told


def launch(requests: list[TrainRequest], size: int = 1, stop_after: int | None = None) -> list[list[Told]]:
    return ranks_module.launch(try_each, requests, stop_after, size=size)


def steps(told: Told) -> list[float]:
    return [event["loss"] for event in told["events"] if event["event"] == "step"]


def test_reports_its_progress(tmp_path: Path) -> None:
    whole = job({"epochs": 3, "batch_size": 8}, load_eval_dataloader="loop_jobs:points")
    ((told,),) = launch([request(whole, tmp_path, checkpoint_batches=4)])
    kinds = [event["event"] for event in told["events"]]
    expected = (
        "start step step step eval step checkpoint step step eval step step checkpoint step eval checkpoint"
    )
    assert kinds == expected.split()
    events = {kind: [e for e in told["events"] if e["event"] == kind] for kind in set(kinds)}
    assert events["start"][0]["total_batches"] == 9
    assert [e["step"] for e in events["step"]] == list(range(1, 10))
    assert [e["epoch"] for e in events["step"]] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert all(e["seconds"] > 0 and e["samples_per_second"] > 0 and e["lr"] == 0.1 for e in events["step"])
    assert events["step"][-1]["eta_seconds"] == 0
    assert events["eval"][2]["eval_loss"] < events["eval"][0]["eval_loss"] < steps(told)[0]
    result = told["result"]
    assert result["status"] == "finished"
    assert (result["steps"], result["batches_per_epoch"], result["total_batches"]) == (9, 3, 9)
    assert result["loss"] == steps(told)[-1]
    assert result["epoch_loss"] == pytest.approx(sum(steps(told)[-3:]) / 3)
    assert result["eval_loss"] == events["eval"][-1]["eval_loss"]
    assert result["checkpoint"] == str(tmp_path / "checkpoints" / "step-00000009")
    assert result["seconds"] > result["setup_seconds"] > 0
    assert result["seconds_per_batch"] > 0
    assert result["inputs"] == [{"name": None, "dtype": "float32", "shape": [-1, 4]}]


def test_a_metric_in_the_place_of_a_count_is_told_of(tmp_path: Path) -> None:
    def pair(name: str) -> TrainRequest:
        return request(job({"epochs": 1}, loss_function=f"loop_jobs:{name}"), tmp_path / name)

    ((metric, count),) = launch([pair("loss_and_metric"), pair("loss_and_count")])
    (said,) = [event["message"] for event in metric["events"] if event["event"] == "warning"]
    assert "loss_function 'loop_jobs:loss_and_metric' returned a pair whose second part is 0." in said
    assert "name the metric in Job(metrics=...)" in said
    assert not [event for event in count["events"] if event["event"] == "warning"]


def untrained_gradients(technique: str, folder: str, ranks: Ranks) -> list[Any]:
    """What the guard says of a job that trains one layer of several, and its losses, stopped in between."""
    hparams = {
        "optimizer": "torch.optim:SGD",
        "parameter_groups": "loop_jobs:last_layer",
        "clip_grad_norm": 0.05,
        "epochs": 2,
    }
    one = request(job(hparams, load_dataloader="loop_jobs:points_in_order"), folder, technique)
    events: list[dict[str, Any]] = []
    watched = dataclasses.replace(ranks, _emit=events.append)
    verdict = check(one, watched)["guard"]
    for steps in (2, None):
        train(dataclasses.replace(one, batch_count=steps), watched)
    return [verdict, [event["loss"] for event in events if event["event"] == "step"]]


def test_gradients_of_parameters_in_no_group_last_one_step(tmp_path: Path) -> None:
    """They count where gradients are clipped, as everywhere, but those of one step do not reach the next."""
    model = load_model(job())
    optimizer = torch.optim.SGD(model[-1].parameters(), lr=0.1)  # type: ignore[index]
    expected = []
    for _ in range(2):
        for x, y in loop_jobs.points_in_order():
            loss = torch.nn.functional.cross_entropy(model(x), y)
            expected.append(float(loss.detach()))
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            model.zero_grad()
    ((verdict, losses),) = ranks_module.launch(untrained_gradients, "single", str(tmp_path), size=1)
    assert verdict == "exact"
    assert losses == pytest.approx(expected, rel=1e-6)


def test_says_what_a_model_is_called_with() -> None:
    objective = Objective(job(), torch.nn.Linear(1, 1), torch.device("cpu"))
    tokens, image = torch.zeros(2, 9, dtype=torch.long), torch.zeros(2, 1, 8, 8)
    batch = {"input_ids": tokens, "pixels": image, "labels": tokens, "width": 8}
    assert objective.describe(batch) == [
        {"name": "input_ids", "dtype": "int64", "shape": [-1, -1]},
        {"name": "pixels", "dtype": "float32", "shape": [-1, 1, 8, 8]},
    ]


def test_goes_on_where_it_was(tmp_path: Path) -> None:
    whole = job({"batches": 8, "batch_size": 8}, model_args={"dropout": 0.5})
    parts = [request(whole, tmp_path / "parts", batch_count=3)] * 4
    ((uninterrupted, *told),) = launch([request(whole, tmp_path / "whole"), *parts])
    assert [t["result"]["status"] for t in told] == ["stopped", "stopped", "finished", "finished"]
    assert [t["result"]["steps"] for t in told] == [3, 6, 8, 8]
    assert [loss for t in told for loss in steps(t)] == steps(uninterrupted)
    assert told[2]["result"]["epoch_loss"] == uninterrupted["result"]["epoch_loss"]
    assert told[3]["result"]["loss"] == uninterrupted["result"]["loss"]


def test_all_ranks_stop_at_the_same_step_with_a_checkpoint(tmp_path: Path) -> None:
    told = launch([request(job({"epochs": 50}), tmp_path, "ddp")], size=2, stop_after=4)
    results = [rank[0]["result"] for rank in told]
    assert [r["status"] for r in results] == ["stopped", "stopped"]
    assert results[0]["steps"] == results[1]["steps"] == 4
    assert read_weights(tmp_path / "checkpoints" / "step-00000004")


def test_a_trial_leaves_nothing_behind(tmp_path: Path) -> None:
    measure = Measure(warmups=2, batches=4, seconds=60.0)
    short = Measure(warmups=1, batches=100, seconds=0.0)
    folder = tmp_path / "untouched"
    requests = [request(job({"batches": 1}), folder, "ddp", measure=m) for m in (measure, short)]
    told = launch(requests, size=2)
    for rank in told:
        assert rank[0]["result"]["batches"] == 4
        assert rank[0]["result"]["seconds_per_batch"] > 0
        assert rank[1]["result"]["batches"] == 1
    assert not folder.exists()


def test_data_without_length_and_an_own_loss() -> None:
    named = job(
        {"epochs": 2, "lr": 0.2},
        load_model="loop_jobs:Named",
        loss_function=None,
        data_args={"named": True},
    )
    ((told, with_function),) = launch(
        [
            request(named, "/nowhere", measure=Measure(0, 6)),
            request(dataclasses.replace(named, loss_function="loop_jobs:loss"), measure=Measure(0, 6)),
        ]
    )
    assert steps(told) == steps(with_function)
    assert steps(told)[-1] < steps(told)[0]


WAYS_OF_ROUNDING: list[Callable[[], object]] = [
    lambda: None,
    lambda: torch.set_float32_matmul_precision("high"),
    lambda: torch.set_float32_matmul_precision("medium"),
    lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    lambda: setattr(torch.backends, "fp32_precision", "ieee"),
    lambda: setattr(torch.backends.cudnn, "fp32_precision", "tf32"),
    lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
]


@pytest.mark.parametrize("way", WAYS_OF_ROUNDING)
@pytest.mark.parametrize(("chosen", "rounds"), [("float32", False), ("tf32", True), ("float64", False)])
def test_what_gpus_may_round(chosen: str, rounds: bool, way: Callable[[], object]) -> None:
    """Whatever the job's code has set: torch raises where its old and its new settings are at odds."""

    def check(rounds: bool) -> None:
        backends = torch.backends.cuda.matmul, torch.backends.cudnn
        assert [backend.allow_tf32 for backend in backends] == [rounds, rounds]
        assert torch.get_float32_matmul_precision() == ("high" if rounds else "highest")
        cudnn = torch.backends.cudnn
        found = {part.fp32_precision for part in (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)}  # type: ignore[attr-defined]
        assert found == {"tf32" if rounds else "ieee"}
        assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"  # type: ignore[attr-defined]

    try:
        way()
        precision.use(chosen)
        check(rounds)
        with precision.exactly(chosen):
            check(False)
        check(rounds)
    finally:
        torch.backends.fp32_precision = "none"  # type: ignore[attr-defined]
        torch.backends.cudnn.fp32_precision = "none"
        precision.use("float32")


def test_nothing_is_rounded_before_the_first_step_either(tmp_path: Path) -> None:
    """What the loss is made of is found by losses of parts, which rounding would tell apart."""
    named: dict[str, Any] = {"load_model": "loop_jobs:rounding_line", "loss_function": "loop_jobs:exact_loss"}
    cut = job({"batches": 2, "batch_size": 8, "accumulate": 2}, **named)
    ((told,),) = launch([request(cut, tmp_path)])
    assert "error" not in told, told
    evaluated = job({"batches": 1, "batch_size": 8}, load_eval_dataloader="loop_jobs:points", **named)
    (found,) = ranks_module.launch(score, request(evaluated), size=1)
    assert found["eval_loss"] > 0


def test_bf16_jobs_are_compared_as_exactly_as_their_weights_are() -> None:
    """A narrow buffer beside weights in float32 must not make the comparison coarser."""
    model = torch.nn.Linear(2, 2)
    model.register_buffer("table", torch.zeros(2, dtype=torch.bfloat16))
    assert precision.exact("bf16", model) == "float32"
    model.weight = torch.nn.Parameter(model.weight.to(torch.bfloat16))
    assert precision.exact("bf16", model) == "bf16"


def test_bf16_and_compiled_models_learn_the_same(tmp_path: Path) -> None:
    variants: list[dict[str, Any]] = [{}, {"precision": "bf16"}, {"compile": True}, {"precision": "tf32"}]
    requests = [request(job({"epochs": 2, **v}), tmp_path / str(n)) for n, v in enumerate(variants)]
    ((plain, bf16, compiled, tf32),) = launch(requests)
    assert steps(tf32) == steps(plain)  # where there is no GPU
    assert steps(bf16) != steps(plain)
    assert steps(bf16) == pytest.approx(steps(plain), abs=0.02)
    assert steps(compiled) == pytest.approx(steps(plain), abs=1e-5)
    weights = [read_weights(t["result"]["checkpoint"]) for t in (plain, bf16, compiled)]
    assert weights[0].keys() == weights[1].keys() == weights[2].keys()
    assert all(w.dtype == next(iter(weights[0].values())).dtype for w in weights[1].values())


#: What plain loops train, and what it is the same as.
ALIKE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "scripted": ({"load_model": "loop_jobs:scripted"}, {}),
    "synchronized norms": (
        {"load_model": "loop_jobs:synchronized"},
        {"load_model": "loop_jobs:line", "model_args": {"norm": True}},
    ),
    "a loss of one number": ({"loss_function": "loop_jobs:loss_of_one_number"}, {}),
}


def guard_then_train(requests: list[TrainRequest], ranks: Ranks) -> list[Told]:
    """What the guard says of each, and its training."""
    return [{"guard": check(one, ranks)["guard"], **try_each([one], None, ranks)[0]} for one in requests]


@pytest.mark.parametrize(("technique", "size"), [("single", 1), ("ddp", 2)])
def test_trains_what_plain_loops_train(technique: str, size: int, tmp_path: Path) -> None:
    requests = [
        request(job({"batches": 4}, **fields), tmp_path / f"{name} {number}", technique)
        for name, both in ALIKE.items()
        for number, fields in enumerate(both)
    ]
    if size == 1:  # a norm that TorchScript has compiled is of one device's samples
        names = {"load_model": "loop_jobs:scripted"}, {"load_model": "loop_jobs:line"}
        requests += [
            request(job({"batches": 4}, model_args={"norm": True}, **name), tmp_path / f"norm {n}")
            for n, name in enumerate(names)
        ]
    told = ranks_module.launch(guard_then_train, requests, size=size)[0]
    assert [one["guard"] for one in told] == ["exact"] * len(requests)
    for one, other in zip(told[::2], told[1::2], strict=True):
        assert len(steps(one)) == 4, one
        assert steps(one) == pytest.approx(steps(other), rel=1e-5)


@pytest.mark.parametrize("technique", ["fsdp", "tensor", "pipeline"])
def test_scripted_modules_are_refused_where_they_would_be_taken_apart(technique: str, tmp_path: Path) -> None:
    scripted = job(load_model="loop_jobs:scripted")
    ((told,), _) = launch([request(scripted, tmp_path, technique)], size=2)
    assert told["error"] == "DoesNotFit"
    assert "compiled by TorchScript" in told["says"]


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("data", "'extra.weight' lies in the memory of the parameter '0.weight'"),
        ("turned", "'0.weight' lies in the memory of the parameter 'extra'"),
        ("buffer", "'extra' lies in the memory of the parameter '0.weight'"),
        ("side by side", None),
        ("frozen", None),
    ],
)
def test_tensors_in_one_memory_are_refused_where_a_step_changes_both(kind: str, says: str | None) -> None:
    a_job = job(load_model="loop_jobs:tied_by_memory", model_args={"kind": kind})
    if says is None:
        load_model(a_job)
    else:
        with pytest.raises(JobError, match=says):
            load_model(a_job)


def test_weights_of_one_mapped_file_cost_no_memory_to_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    model, whole = loop_jobs.line(), torch.zeros(200)
    begun = 0
    for parameter in model.parameters():
        parameter.data = whole[begun : begun + parameter.numel()].view(parameter.shape)
        begun += parameter.numel()
    monkeypatch.delattr(torch, "zeros")  # of which there would be a byte for each byte of the file
    assert shared_memory.found(model) is None


def batches_of(data: str) -> list[Any]:
    """What is trained on of one epoch."""
    a_job = job(load_dataloader=data)
    found = []
    for batch in load_data(a_job, data).batches(Position(), Cut()):
        found.append(copy.deepcopy(batch.micro_batches[0].data))
        if batch.ends_epoch:
            return found
    return found


def test_batches_are_what_they_were_when_the_next_is_made_of_their_memory() -> None:
    for number, batch in enumerate(batches_of("loop_jobs:Refilled")):
        assert [batch[name].mean(dtype=float) for name in ("x", "labels")] == [number, number]
        assert batch["array"].mean() == number
        assert set(batch["text"]) == {str(number)}
    assert number == 2


def test_what_a_loader_makes_of_its_batches_is_trained_on() -> None:
    for (x, _), (own, _) in zip(loop_jobs.doubled(), batches_of("loop_jobs:doubled"), strict=True):
        assert torch.equal(x, own)


def test_parameters_of_a_loss_that_nothing_trains_are_told(tmp_path: Path) -> None:
    losses = ("tempered", "tempered_for_good", "loss")
    asked = [
        request(job({"batches": 2}, loss_function=f"loop_jobs:{loss}"), tmp_path / loss) for loss in losses
    ]
    told = launch(asked)[0]
    warnings = [[e["message"] for e in one["events"] if e["event"] == "warning"] for one in told]
    ((message,), *none) = warnings
    assert "'temperature'" in message
    assert "'loop_jobs:tempered' stay as they are" in message
    assert none == [[], []]


def test_what_an_optimizer_keeps_as_attributes_is_resumed(tmp_path: Path) -> None:
    counting = job({"epochs": 3, "batch_size": 8, "optimizer": "loop_jobs:Counting", "lr": 0.01})
    first = request(counting, tmp_path / "resumed", batch_count=4)
    then = dataclasses.replace(first, batch_count=None)
    ((before, after, whole),) = launch([first, then, request(counting, tmp_path / "whole")])
    assert steps(before) + steps(after) == steps(whole)


def test_what_an_optimizer_hides_is_told_at_its_first_step(tmp_path: Path) -> None:
    hiding = job({"batches": 3, "optimizer": "loop_jobs:Hiding"})
    trial = request(hiding, measure=Measure(1, 1))
    ((told, tried),) = launch([request(hiding, tmp_path), trial])
    assert told["error"] == tried["error"] == "JobError"
    assert "what Hiding keeps as its attribute 'averages' changes while it trains" in told["says"]


def test_noise_that_an_optimizer_draws_is_the_same_on_all_devices(tmp_path: Path) -> None:
    noisy = job({"epochs": 2, "batch_size": 8, "optimizer": "loop_jobs:Noisy", "precision": "float64"})
    ((alone,),) = launch([request(noisy, tmp_path / "single")])
    (shared,), *_ = launch([request(noisy, tmp_path / "ddp", "ddp")], size=2)
    assert steps(shared) == pytest.approx(steps(alone), rel=1e-12)
    (first,), *_ = launch([request(noisy, tmp_path / "resumed", "ddp", batch_count=2)], size=2)
    ((rest,),) = launch([request(noisy, tmp_path / "resumed")])
    assert steps(first) + steps(rest) == pytest.approx(steps(alone), rel=1e-12)
