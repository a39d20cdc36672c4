"""Resumed is uninterrupted for jobs that remember more than weights; what can't be kept is told before."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import counting_functions
import pytest
import remembering_values
import torch

from saturn_airflow.launch.request import TrainRequest
from saturn_airflow.model.errors import JobError
from saturn_airflow.model.jobs import HParams, Job
from saturn_airflow.training import ranks as ranks_module
from saturn_airflow.training.guarding.guarded import check
from saturn_airflow.training.loop import train
from saturn_airflow.training.ranks import Ranks

pytestmark = pytest.mark.ranks

EPOCHS, STOPPED_AT = 3, 6  # of 12 steps, in the middle of an epoch


def job(schedule: str | None = None, **changes: Any) -> Job:
    fields: dict[str, Any] = {
        "load_model": "remembering_jobs:line",
        "load_dataloader": "remembering_jobs:shuffled",
        "loss_function": "torch.nn.functional:mse_loss",
    }
    settings: dict[str, Any] = {
        "optimizer": "torch.optim:SGD",
        "lr": 0.01,
        "epochs": EPOCHS,
        "precision": "float64",
    }
    if schedule is not None:
        settings["lr_scheduler"] = f"remembering_jobs:{schedule}"
    return Job("remembers", hparams=HParams(**settings), **{**fields, **changes})


def with_loss(name: str) -> Job:
    return job(loss_function=f"remembering_jobs:{name}")


JOBS = {
    **{
        kind: job(load_model="remembering_values:remembers", model_args={"kind": kind})
        for kind in remembering_values.KINDS
    },
    "what a module says": job(load_model="remembering_jobs:says_its_state"),
    "an attribute of a class": job(load_model="remembering_jobs:counts"),
    "global variables": with_loss("counting_loss"),
    "a loss with buffers": with_loss("centered"),
    "a loss that is an object": with_loss("scheduled"),
    "a stream that counts epochs": job(),
    "data that note what they give": job(
        load_model="remembering_jobs:looks_at_data", load_dataloader="remembering_jobs:gives"
    ),
    "an object of data and model": job(
        load_model="remembering_jobs:holds_both", load_dataloader="remembering_jobs:counts_in_both"
    ),
    **{name: job(loss_function=f"counting_functions:{name}") for name in counting_functions.LOSSES},
    **{
        what: job(load_model="counting_functions:counts_in_a_function", model_args={"kind": kind})
        for what, kind in (("a function of the model's", "attribute"), ("a new attribute", "new attribute"))
    },
    **{
        what: job(load_model="counting_functions:counts_in_a_function", model_args={"kind": kind})
        for what, kind in (("a hook", "hook"), ("two hooks", "two hooks"), ("an object's hook", "object"))
    },
    "what holds itself": job(load_model="counting_functions:holds_what_holds_itself"),
    "a schedule that draws": job("drawn_rate"),
    "a schedule that counts": job("counted_rate"),
    "a schedule by the loss": job("rate_by_losses", loss_function="remembering_jobs:noting_loss"),
}


def train_all(requests: list[TrainRequest], ranks: Ranks) -> list[tuple[list[float], list[str]]]:
    """Losses and warnings of each."""
    told = []
    for request in requests:
        events: list[dict[str, Any]] = []
        train(request, dataclasses.replace(ranks, _emit=events.append))
        losses = [event["loss"] for event in events if event["event"] == "step"]
        told.append((losses, [event["message"] for event in events if event["event"] == "warning"]))
    return told


def requests(folder: Path, batch_count: int | None, technique: str = "single") -> list[TrainRequest]:
    return [
        TrainRequest(
            job=a_job,
            technique=technique,
            folder=str(folder / what),
            batch_count=batch_count,
            checkpoint_seconds=None,
        )
        for what, a_job in JOBS.items()
    ]


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[float], list[float]]]:
    """Of each job, trained in one go and in two processes."""
    folder = tmp_path_factory.mktemp("remembering")
    whole = ranks_module.launch(train_all, requests(folder / "whole", None), size=1)[0]
    first = ranks_module.launch(train_all, requests(folder / "parts", STOPPED_AT), size=1)[0]
    rest = ranks_module.launch(train_all, requests(folder / "parts", None), size=1)[0]
    assert not [warnings for _, warnings in (*whole, *first, *rest) if warnings]
    return {what: (w[0], f[0] + r[0]) for what, w, f, r in zip(JOBS, whole, first, rest, strict=True)}


@pytest.mark.parametrize("what", JOBS)
def test_what_it_remembers_is_resumed(what: str, losses: dict[str, tuple[list[float], list[float]]]) -> None:
    whole, parts = losses[what]
    assert len(whole) == 4 * EPOCHS
    assert parts == whole


def test_data_beside_the_model_go_on_within_their_first_epoch(tmp_path: Path) -> None:
    """Nothing has changed when it began, but the checkpoint has what was global in that file later on."""
    told = [
        ranks_module.launch(train_all, [asked], size=1)[0][0][0]
        for folder, count in (("whole", None), ("parts", 2), ("parts", None))
        for asked in [
            TrainRequest(
                job=job(load_dataloader="remembering_jobs:noisy"),
                technique="single",
                folder=str(tmp_path / folder),
                batch_count=count,
                checkpoint_seconds=None,
            )
        ]
    ]
    assert told[1] + told[2] == told[0]


def named(reference: Any) -> Any:
    module, name = reference.split(":")
    return getattr(importlib.import_module(module), name)


def plain_losses(a_job: Job) -> list[float]:
    """A plain loop, which no look ahead disturbs."""
    model = named(a_job.load_model)(**a_job.model_args).double().train()
    loss_of = named(a_job.loss_function)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    schedule = a_job.hparams.lr_scheduler
    scheduler = named(schedule)(optimizer) if schedule else None
    stream, losses = named(a_job.load_dataloader)(), []
    for _ in range(EPOCHS):
        for inputs, targets in stream:
            loss = loss_of(model(inputs.double()), targets.double())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
            losses.append(float(loss))
    return losses


def run_plain(ranks: Ranks) -> list[list[float]]:
    return [plain_losses(a_job) for a_job in JOBS.values()]


HOOKS = ("a hook", "two hooks", "an object's hook")
SHARED = (
    *("an array", "a deque", "an object", "a count", "global variables", "a loss that is an object"),
    *("by_attribute", "by_new_attribute", "by_closure", "by_another_module", "a function of the model's"),
    *HOOKS,
)


def test_looking_ahead_is_not_remembered(
    tmp_path: Path, losses: dict[str, tuple[list[float], list[float]]]
) -> None:
    """Where batches are cut, Saturn looks at the loss of parts before it trains."""
    plain = dict(zip(JOBS, ranks_module.launch(run_plain, size=1)[0], strict=True))
    for what, (whole, _) in losses.items():
        assert whole == pytest.approx(plain[what], rel=1e-9), what
    shared = [
        one
        for technique, names in (("ddp", (*SHARED, "a stream that counts epochs")), ("fsdp", HOOKS))
        for one in requests(tmp_path / technique, None, technique)
        if Path(one.folder).name in names
    ]
    told = ranks_module.launch(train_all, shared, size=2)[0]
    for one, (found, _) in zip(shared, told, strict=True):
        assert found == pytest.approx(plain[Path(one.folder).name], rel=1e-9), one.folder


def guard(a_job: Job, ranks: Ranks) -> str:
    try:
        return str(check(TrainRequest(job=a_job, technique="single"), ranks)["guard"])
    except JobError as error:
        return str(error)


@pytest.mark.parametrize(
    ("a_job", "name"),
    [
        (job(load_model="remembering_jobs:iterates"), "steps"),
        (with_loss("iterating_loss"), "remembering_jobs.STEPS"),
        (with_loss("made_late"), "remembering_jobs.TEACHER"),
        (job(loss_function="counting_functions:by_generator"), "counting_functions.by_generator[closure 0]"),
    ],
)
def test_what_would_be_lost_is_told_at_the_trial(a_job: Job, name: str) -> None:
    (told,) = ranks_module.launch(guard, a_job, size=1)
    assert told.startswith(f"training depends on '{name}', which it changes, and which a job that is resumed")
    assert "get_extra_state()" in told


@pytest.mark.parametrize("by", [0.5, 0.0])
def test_data_that_follow_the_losses_are_refused_at_the_trial(by: float) -> None:
    a_job = job(
        load_dataloader="remembering_jobs:follows",
        data_args={"by": by},
        loss_function="remembering_jobs:telling_loss",
    )
    (told,) = ranks_module.launch(guard, a_job, size=1)
    assert told == "exact" if not by else "as where a sampler follows the losses" in told


def test_what_data_and_loss_both_count_is_refused_at_the_trial() -> None:
    a_job = job(
        load_dataloader="remembering_jobs:counts_with_the_loss",
        loss_function="remembering_jobs:counting_loss",
    )
    (told,) = ranks_module.launch(guard, a_job, size=1)
    assert "as where a sampler follows the losses" in told


def test_what_is_made_anew_in_each_step_is_not_missed(tmp_path: Path) -> None:
    a_job = job(load_model="remembering_jobs:notes_its_output")
    assert ranks_module.launch(guard, a_job, size=1) == ["exact"]
    request = dataclasses.replace(requests(tmp_path, 5)[0], job=a_job)
    ((_, saved),) = ranks_module.launch(train_all, [request], size=1)[0]
    ((_, resumed),) = ranks_module.launch(train_all, [request], size=1)[0]
    assert ["'last' (it is a SimpleNamespace" in told for told in (saved[0], resumed[0])] == [True, True]


@pytest.mark.parametrize("says", [True, False])
def test_what_a_later_stage_counts_is_looked_at_and_resumed(tmp_path: Path, says: bool) -> None:
    a_job = job(load_model="counting_functions:counting_blocks", model_args={"says": says})

    def losses(folder: str, technique: str, batch_count: int | None = None) -> list[float]:
        request = TrainRequest(
            job=a_job,
            technique=technique,
            parameters={"micro_batches": 1} if technique == "pipeline" else {},
            folder=str(tmp_path / folder),
            batch_count=batch_count,
            checkpoint_seconds=None,
        )
        size = 2 if technique == "pipeline" else 1
        told: list[tuple[list[float], list[str]]] = ranks_module.launch(train_all, [request], size=size)[0]
        return told[0][0]

    plain = losses("single", "single")
    parts = [loss for count in (STOPPED_AT, 3, None) for loss in losses("parts", "pipeline", count)]
    assert losses("pipeline", "pipeline") == parts == pytest.approx(plain, rel=1e-9)
