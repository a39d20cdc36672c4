"""Each kind of refusal is needed: without it, and without the guard, training comes to something else."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor

from families.family import find
from families.matrix import Strategy
from families.verdicts import weights_in
from saturn_airflow.launch.request import DoesNotFit, TrainRequest
from saturn_airflow.model.jobs import HParams, Job
from saturn_airflow.training.loop import train
from saturn_airflow.training.losses.rules import SAMPLES
from saturn_airflow.training.ranks import Ranks, launch

pytestmark = pytest.mark.ranks

SINGLE, DDP, FSDP, PIPELINE = (
    Strategy("single"),
    Strategy("ddp", 2),
    Strategy("fsdp", 2),
    Strategy("pipeline", 2),
)
_PACKAGE = "saturn_airflow."
BY_PARTS = {"training.losses.decompose.find_rule": lambda *args, **kwargs: SAMPLES}
BY_BUFFERS = {"parallelism.changing_buffers.ChangingBuffers.look": lambda self, *, last: None}
BY_STATE = {"parallelism.anatomy._state": lambda model: {}}


class ClipsParts(torch.optim.SGD):
    """Scales what this device has of a gradient by the norm of that."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                grad = parameter.grad
                here = grad.to_local() if isinstance(grad, DTensor) else grad
                here.div_(here.norm() + 1e-6)
        return super().step()


class ClipsTogether(torch.optim.SGD):
    """Scales the gradients of the parameters that it has by the norm of them all."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], 0.1)
        return super().step()


def allow(*args: Any, **kwargs: Any) -> None:
    """In the place of what refuses."""


@dataclass(frozen=True)
class Case:
    """A family under a strategy that refuses it.

    :param without: what is put in the place of what refuses.
    """

    family: str
    strategy: Strategy
    without: dict[str, Callable[..., Any]]
    hparams: dict[str, Any] = dataclasses.field(default_factory=dict)
    accumulate: int = 1


CASES = {
    "coupled samples": Case("contrastive loss", DDP, BY_PARTS),
    "a mean by hand": Case("a mean over a mask", SINGLE, BY_PARTS, accumulate=3),
    "several means, accumulated": Case("bert, pretraining", SINGLE, BY_PARTS, accumulate=2),
    "batch norm, accumulated": Case(
        "batch norm of vectors",
        SINGLE,
        {"parallelism.unsupported.refuse_accumulated_batch_norm": allow, **BY_PARTS, **BY_BUFFERS},
        accumulate=2,
    ),
    "batch norm in a pipeline": Case(
        "batch norm", PIPELINE, {"parallelism.unsupported.refuse_batch_norm": allow, **BY_PARTS, **BY_STATE}
    ),
    "buffers that follow a share": Case("buffers that follow the data", DDP, BY_BUFFERS),
    "buffers that change in each pass": Case("spectral norm", SINGLE, BY_BUFFERS, accumulate=2),
    "buffers that change in each pass of a pipeline": Case("spectral norm", PIPELINE, BY_STATE),
    "parts of parameters": Case(
        "linear layers in a row",
        FSDP,
        {"training.optim.optimizers.refuse_coupled": allow},
        {"optimizer": f"{__name__}:ClipsParts", "optimizer_args": {}},
    ),
    "some of the parameters": Case(
        "blocks with a plan",
        PIPELINE,
        {"training.optim.optimizers.refuse_mixing": allow},
        {"optimizer": f"{__name__}:ClipsTogether", "optimizer_args": {}},
    ),
}


def job(case: Case) -> Job:
    hparams: dict[str, Any] = {
        "epochs": 1,
        "lr": 0.05,
        "precision": "float64",
        "optimizer": "torch.optim:SGD",
        "optimizer_args": {"momentum": 0.9},
        "clip_grad_norm": None,
        **case.hparams,
    }
    given = {"family": case.family}
    return Job(
        "needed",
        load_model="families.family:model",
        model_args=given,
        load_dataloader="families.family:data",
        data_args=given,
        loss_function=find(case.family).loss,
        hparams=HParams(**hparams),
    )


def request(case: Case, strategy: Strategy, accumulate: int, folder: Path) -> TrainRequest:
    a_job = job(case)
    a_job = dataclasses.replace(a_job, hparams=dataclasses.replace(a_job.hparams, accumulate=accumulate))
    return TrainRequest(
        job=a_job.to_dict(),
        technique=strategy.technique,
        parameters=strategy.parameters,
        folder=str(folder),
        checkpoint_seconds=None,
    )


def train_each(requests: list[tuple[TrainRequest, str]], ranks: Ranks) -> list[str]:
    """Train each without what refuses the case that is named; why it was refused, or nothing."""
    found = []
    for one, name in requests:
        without = CASES[name].without if name else {}
        with contextlib.ExitStack() as stack:
            for place, instead in {**without, "training.job_training.looks.can_differ": allow}.items():
                stack.enter_context(mock.patch(_PACKAGE + place, instead))
            try:
                train(one, ranks)
                found.append("")
            except DoesNotFit as reason:
                found.append(str(reason))
    return found


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, float]]:
    """Of each case what it is refused for, and how far weights are off without that."""
    root = tmp_path_factory.mktemp("needed")
    told: dict[str, list[str]] = {}
    for size in (1, 2):
        requests: list[tuple[str, TrainRequest, str]] = []
        for name, case in CASES.items():
            if size == 1:
                requests.append((name, request(case, SINGLE, 1, root / name / "plain"), ""))
            if case.strategy.devices == size:
                refused = request(case, case.strategy, case.accumulate, root / name / "refused")
                without = request(case, case.strategy, case.accumulate, root / name / "without")
                requests += [(name, refused, ""), (name, without, name)]
        reasons = launch(train_each, [(one, without) for _, one, without in requests], size=size)[0]
        for (name, *_), reason in zip(requests, reasons, strict=True):
            told.setdefault(name, []).append(reason)
    found = {}
    for name, (plain, refused, without) in told.items():
        assert (plain, without) == ("", ""), name
        expected, got = (weights_in(root / name / folder) for folder in ("plain", "without"))
        off = max(
            float((got[key].double() - tensor.double()).abs().max()) for key, tensor in expected.items()
        )
        found[name] = refused, off
    return found


@pytest.mark.parametrize("name", CASES)
def test_without_the_refusal_the_result_is_another(name: str, outcomes: dict[str, tuple[str, float]]) -> None:
    refused, off = outcomes[name]
    assert refused
    assert off > 1e-4, "what is refused would be right"
