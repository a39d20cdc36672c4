"""Techniques of a user's own that are wrong in one way end in no result that is silently wrong."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import own_techniques
import pytest
import torch
from checking import job
from own_techniques import technique

from saturn_airflow import library
from saturn_airflow.launch.request import ChangesResultError, DoesNotFit, TrainRequest
from saturn_airflow.model.jobs import Job
from saturn_airflow.training import ranks as ranks_module
from saturn_airflow.training.guarding.guarded import check
from saturn_airflow.training.loop import train
from saturn_airflow.training.ranks import Ranks

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1200)]

ALONE = Ranks(rank=0, size=1, device=torch.device("cpu"))
EVALUATED = {"load_eval_dataloader": "odd_models:vectors"}
STOPPED_AT, BATCHES = 6, 12


def small(**changes: Any) -> Job:
    """Float32 and AdamW, as most jobs have them: the guard takes little of what differs for rounding."""
    hparams = {"precision": "float32", "lr": 1e-2, "batches": BATCHES, **changes.pop("hparams", {})}
    return job(load_model="own_techniques:small", hparams=hparams, **changes)


def request(a_job: Job, kind: str, folder: Path | str = "", **changes: Any) -> TrainRequest:
    library.register("one", technique(getattr(own_techniques, kind)))
    settings = {"checkpoint_seconds": None, **changes}
    return TrainRequest(job=a_job, technique="one", folder=str(folder), **settings)


def refused(call: Any, *args: Any) -> str:
    with pytest.raises(DoesNotFit) as told:
        call(*args, ALONE)
    return str(told.value)


GROUPS = {"parameter_groups": "own_techniques:decays_matrices"}
IN_FIRST_STEPS: dict[str, tuple[Job, str]] = {
    "Averages": (small(), "what step 2 of the optimizer makes of"),
    "DecaysAll": (small(hparams=GROUPS), "the optimizer's 'weight_decay' in step 1 is 0.01"),
    "OtherEpsilon": (small(), "the optimizer's 'eps' in step 1 is 1e-07 in the place of 1e-08"),
    "EvaluatesAsItTrains": (small(**EVALUATED), "the loss of an evaluation"),
    "EvaluatesFirstWeights": (small(**EVALUATED), "the loss of an evaluation"),
    "TrainsAsItEvaluates": (small(), "the loss of step 1"),
    "StaysInEvaluation": (small(**EVALUATED), "the loss of step 2"),
    "DoublesGradients": (
        small(hparams={"clip_grad_norm": 1e-3}),
        "before it is clipped in step 2 is off by 1e+02%",
    ),
    "ClipsEach": (small(hparams={"clip_grad_norm": 1e3}), "in step 2 is off by"),
    "TrainsCopies": (small(), "trainable() gives in the place of 'enter.weight' a tensor"),
    "Unties": (job(load_model="own_techniques:tied"), "step 1"),
}


@pytest.mark.parametrize("kind", IN_FIRST_STEPS)
def test_it_is_refused_before_anything_is_trained(kind: str) -> None:
    a_job, words = IN_FIRST_STEPS[kind]
    assert words in refused(check, request(a_job, kind))


LATER = {
    "AveragesLater": ({}, "what step 12 of the optimizer makes of"),
    "StepsTheScheduleItself": ({"accumulate": 2}, "the optimizer's 'lr' in step 12 is"),
    "MovesFrozen": ({}, "'scale' changes in step 12, which has no gradient of it"),
    "MovesInBackward": ({}, "'leave.weight' after step 12 is off by"),
    "StepsTwice": ({}, "what step 12 of the optimizer makes of"),
}
# Of an optimizer that looks at rows and columns.
OF_WHOLE_MATRICES = {"optimizer": "torch.optim:Adafactor"}
LATER_OF_WHOLE_MATRICES = {
    "AveragesLater": "'enter.weight' as step 12 of the optimizer leaves it is changed by somebody else",
    "StepsTheScheduleItself": "the optimizer's 'lr' in step 12 is",
    "MovesFrozen": "'scale' changes in step 12, which has no gradient of it",
    "StepsTwice": "the optimizer's step on 'enter.weight' in step 12 is taken more than once",
}


@pytest.mark.parametrize("kind", LATER)
def test_what_begins_later_is_found_at_the_last_step(kind: str, tmp_path: Path) -> None:
    hparams, words = LATER[kind]
    asked = request(small(hparams=hparams), kind, tmp_path, checkpoint_batches=4)
    assert check(asked, ALONE)["guard"] == "exact"
    assert words.replace(" after step 12", "") in refused(train, asked)
    assert not list(asked.checkpoints.glob("step-*")), "nothing was compared since the first steps"


@pytest.mark.parametrize("kind", LATER_OF_WHOLE_MATRICES)
def test_so_is_what_begins_around_the_steps_of_other_optimizers(kind: str, tmp_path: Path) -> None:
    asked = request(small(hparams=OF_WHOLE_MATRICES), kind, tmp_path)
    assert LATER_OF_WHOLE_MATRICES[kind] in refused(train, asked)


def test_a_schedule_of_its_own_shows_where_the_jobs_follows_from_it(tmp_path: Path) -> None:
    """A schedule that multiplies what it finds carries on what somebody else wrote."""
    falls = {"lr_scheduler": "torch.optim.lr_scheduler:ExponentialLR", "lr_scheduler_args": {"gamma": 0.9}}
    asked = request(small(hparams=falls), "StepsTheScheduleItself", tmp_path)
    assert "the optimizer's 'lr' in step 12 is" in refused(train, asked)


@pytest.mark.parametrize(
    ("kind", "hparams", "words"),
    [
        ("ForgetsState", {}, "what step 7 of the optimizer makes of"),
        ("ForgetsState", OF_WHOLE_MATRICES, "what the optimizer keeps of 'enter.weight' in step 7 is gone"),
        ("ComputesWithCopy", {}, "changes the result at step 7"),
    ],
)
def test_what_a_resume_loses_is_found_at_its_first_step(
    kind: str, hparams: dict[str, Any], words: str, tmp_path: Path
) -> None:
    asked = request(small(hparams=hparams), kind, tmp_path, batch_count=STOPPED_AT)
    assert check(asked, ALONE)["guard"] == "exact"
    assert train(asked, ALONE)["steps"] == STOPPED_AT
    assert words in refused(train, dataclasses.replace(asked, batch_count=None))


SCHEDULES: list[dict[str, Any]] = [
    {"optimizer": "torch.optim:SGD", "optimizer_args": {"momentum": 0.9, "nesterov": True}},
    {"optimizer": "torch.optim:NAdam", "accumulate": 2, "clip_grad_norm": 0.1},
    {"optimizer": "torch.optim:Adagrad", "optimizer_args": {"lr_decay": 0.1}},
    {**OF_WHOLE_MATRICES, "lr_scheduler": "torch.optim.lr_scheduler:LinearLR"},
    {"optimizer": "odd_optimizers:ClampsInAHook", "optimizer_args": {"momentum": 0.9}},
    {
        "lr_scheduler": "torch.optim.lr_scheduler:OneCycleLR",
        "lr_scheduler_args": {"max_lr": 0.1},
        **GROUPS,
    },
]


@pytest.mark.parametrize("hparams", SCHEDULES)
def test_what_is_right_is_trained_and_resumed(hparams: dict[str, Any], tmp_path: Path) -> None:
    asked = request(small(hparams=hparams, **EVALUATED), "Right", tmp_path, batch_count=STOPPED_AT)
    assert check(asked, ALONE)["guard"] == "exact"
    events: list[dict[str, Any]] = []
    watched = dataclasses.replace(ALONE, _emit=events.append)
    train(asked, watched)
    told = train(dataclasses.replace(asked, batch_count=None), watched)
    assert (told["status"], told["steps"]) == ("finished", BATCHES)
    looked = [event["step"] for event in events if event["event"] == "looked"]
    assert looked == [STOPPED_AT, STOPPED_AT + 1, BATCHES]


def on_all_ranks(a_job: Job, kind: str, ranks: Ranks) -> str:
    try:
        return str(check(request(a_job, kind), ranks)["guard"])
    except ChangesResultError as error:
        return str(error)


def test_a_buffer_must_be_right_on_every_rank() -> None:
    """Any of them may write it into a checkpoint."""
    a_job = job(model_args={"extra": "norm"})
    for said in ranks_module.launch(on_all_ranks, a_job, "MovesBufferOfLastRank", size=2):
        assert "the buffer 'extra.running_mean' after step 1 is off by" in said
