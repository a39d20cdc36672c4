"""Each kind of refusal is needed: without it, and without the guard, training comes to something else."""

from __future__ import annotations

import contextlib
import dataclasses
import math
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
from saturn_airflow.launch.failures import RanksFailedError
from saturn_airflow.launch.request import DoesNotFit, NotANumberError, TrainRequest
from saturn_airflow.model.errors import JobError
from saturn_airflow.model.jobs import HParams, Job
from saturn_airflow.training.loop import train
from saturn_airflow.training.losses.rules import SAMPLES
from saturn_airflow.training.ranks import Ranks, launch

pytestmark = pytest.mark.ranks

SINGLE, SPILL = Strategy("single"), Strategy("spill")
DDP, FSDP, PIPELINE, TENSOR = (Strategy(technique, 2) for technique in ("ddp", "fsdp", "pipeline", "tensor"))
AGAIN = Strategy("single", parameters={"recompute": True})
_PACKAGE = "saturn_airflow."
LOST, BLAMED = "the loss became no number", "the job's own code is blamed, and nothing more is tried"
BY_PARTS = {"training.losses.decompose.find_rule": lambda *args, **kwargs: SAMPLES}
BY_BUFFERS = {"parallelism.changing_buffers.ChangingBuffers.look": lambda self, *, last: None}
BY_STATE = {"parallelism.anatomy._buffer_versions": lambda model: {}}


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


class ScalesRows(torch.optim.Optimizer):
    """Scales each row of a gradient by what it has been so far, of which it keeps one number a row."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                grad, matrix = parameter.grad, parameter.ndim > 1
                rows = grad.square().mean(1) if matrix else grad.square()
                kept = self.state[parameter].setdefault("rows", torch.zeros_like(rows)).add_(rows)
                parameter.sub_(group["lr"] * grad / (kept.unsqueeze(1) if matrix else kept).sqrt().add(0.1))


def allow(*args: Any, **kwargs: Any) -> None:
    """In the place of what refuses."""


TWICE = {
    "parallelism.recomputation.Call._check_unchanged": allow,
    "parallelism.recomputation.Call.check": allow,
    "parallelism.recomputation.Call._compare": allow,
}
AS_THEY_COME = {
    "parallelism.sharding._CallsInOrder._before_unit": allow,
    "parallelism.sharding._CallsInOrder._after_pass": allow,
    "parallelism.agreeing.Agreement._compare": allow,
}


def by_size(apart: dict[str, float]) -> dict[str, bool]:
    """Which gradients are taken for partial where none is too near to call."""
    return {name: value > 0.1 for name, value in apart.items()}


@dataclass(frozen=True)
class Case:
    """A family, or another model on a family's data, under a strategy that refuses it.

    :param without: what is put in the place of what refuses.
    :param model: of :mod:`families.refused`.
    :param by_one: whether one of the devices refuses it, and ends the others.
    :param resumed: whether it is stopped and resumed on the way.
    """

    family: str
    strategy: Strategy
    without: dict[str, Any]
    hparams: dict[str, Any] = dataclasses.field(default_factory=dict)
    accumulate: int = 1
    model: str = ""
    by_one: bool = False
    resumed: bool = False


def of_model(model: str, strategy: Strategy, without: dict[str, Any], **others: Any) -> Case:
    return Case("blocks with a plan", strategy, without, model=model, **others)


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
    "an input changed in place, computed again": of_model("changes_input", AGAIN, TWICE),
    "a weight changed in place, computed again": of_model("changes_weight", AGAIN, TWICE),
    "a block that can't be repeated": of_model("draws", AGAIN, TWICE),
    "a weight changed in place, streamed": of_model(
        "changes_weight", SPILL, {"parallelism.spilling._check_unchanged": allow, **TWICE}
    ),
    "a hook on a streamed weight": of_model("hooked", SPILL, {"parallelism.spilling._refuse_hooks": allow}),
    "partial gradients that are not yet there": of_model(
        "gated", TENSOR, {"parallelism.tensor_cuts.TensorCut._check_decided": allow}
    ),
    "gradients neither whole nor partial": of_model(
        "sums_heads", TENSOR, {"parallelism.tensor_cuts._verdicts": by_size}
    ),
    "cuts that part what belongs together": of_model(
        "averages", PIPELINE, {"parallelism.anatomy.Anatomy.places": property(lambda found: [1, 2])}
    ),
    "blocks in another order on each device": of_model("routes", FSDP, AS_THEY_COME, by_one=True),
    "statistics of its own": Case(
        "batch renorm",
        DDP,
        {
            "parallelism.batch_norm._shared": lambda name, norm, whole: norm.forward,
            **BY_PARTS,
            **BY_BUFFERS,
        },
    ),
    "a frozen weight that moves, accumulated": Case(
        "moving average in the model", SINGLE, {**BY_PARTS, **BY_BUFFERS}, accumulate=2
    ),
    "something of each parameter in a list of the optimizer's": Case(
        "blocks with a plan",
        FSDP,
        {"training.optim.own_state.OwnState._refuse_parts": allow},
        {"optimizer": "families.inventions:KeepsLists", "optimizer_args": {}},
        resumed=True,
    ),
    "state of another shape than its parameter": Case(
        "blocks with a plan",
        FSDP,
        {"training.optim.optimizers.refuse_coupled": allow},
        {"optimizer": f"{__name__}:ScalesRows", "optimizer_args": {}},
        resumed=True,
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
        load_model=f"families.refused:{case.model}" if case.model else "families.family:model",
        model_args={} if case.model else given,
        load_dataloader="families.family:data",
        data_args=given,
        loss_function=find(case.family).loss,
        hparams=HParams(**hparams),
    )


def request(case: Case, strategy: Strategy, accumulate: int, folder: Path) -> TrainRequest:
    a_job = job(case)
    a_job = dataclasses.replace(a_job, hparams=dataclasses.replace(a_job.hparams, accumulate=accumulate))
    return TrainRequest(
        job=a_job,
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
            for place, instead in {**without, "training.job_training.spot_checks.can_differ": allow}.items():
                stack.enter_context(mock.patch(_PACKAGE + place, instead))
            try:
                train(one, ranks)
                found.append("")
            except DoesNotFit as reason:
                found.append(str(reason))
            except NotANumberError:
                found.append(LOST)
            except JobError:
                found.append(BLAMED)
    return found


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, float]]:
    """Of each case what it is refused for, and how far weights are off without that."""
    root = tmp_path_factory.mktemp("needed")
    told: dict[str, dict[str, str]] = {name: {} for name in CASES}
    for size in (1, 2):
        requests: list[tuple[str, str, TrainRequest]] = []
        for name, case in CASES.items():
            if size == 1:
                requests.append((name, "plain", request(case, SINGLE, 1, root / name / "plain")))
            if case.strategy.devices == size:
                for way in ("without", "refused"):
                    one = request(case, case.strategy, case.accumulate, root / name / way)
                    if case.by_one and way == "refused":
                        told[name][way] = refused_by_one(one)
                        continue
                    if case.resumed:
                        requests.append((name, way, dataclasses.replace(one, batch_count=2)))
                    requests.append((name, way, one))
        reasons = launch(
            train_each, [(one, name if way == "without" else "") for name, way, one in requests], size=size
        )[0]
        for (name, way, _), reason in zip(requests, reasons, strict=True):
            told[name][way] = reason
    return {name: (ways["refused"], how_far_off(root / name, name, ways)) for name, ways in told.items()}


def refused_by_one(one: TrainRequest) -> str:
    with pytest.raises(RanksFailedError) as caught:
        launch(train, one, size=2, hang_seconds=60)
    assert caught.value.failure.status == "does_not_fit"
    return caught.value.failure.reason


def how_far_off(folder: Path, name: str, ways: dict[str, str]) -> float:
    """How far weights are off without the refusal; infinity where that loses the job."""
    assert ways["plain"] == "", name
    assert ways["without"] in ("", LOST, BLAMED), name
    if ways["without"]:
        return math.inf
    expected, got = (weights_in(folder / way) for way in ("plain", "without"))
    return max(float((got[key].double() - tensor.double()).abs().max()) for key, tensor in expected.items())


@pytest.mark.parametrize("name", CASES)
def test_without_the_refusal_the_result_is_another(name: str, outcomes: dict[str, tuple[str, float]]) -> None:
    refused, off = outcomes[name]
    assert refused
    assert off > 1e-4, "what is refused would be right"
