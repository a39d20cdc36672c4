"""A schedule is a function of the number of steps: schedulers that read weights or gradients are refused."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

from saturn_airflow.launch.request import TrainRequest
from saturn_airflow.model.errors import JobError
from saturn_airflow.model.jobs import HParams, Job
from saturn_airflow.training.guarding.guarded import check
from saturn_airflow.training.optim.group_state import GroupState
from saturn_airflow.training.optim.optimizers import make_scheduler
from saturn_airflow.training.ranks import Ranks

SCHEDULES: dict[str, dict[str, Any]] = {
    "LinearLR": {},
    "CosineAnnealingLR": {"T_max": 5},
    "CosineAnnealingWarmRestarts": {"T_0": 2, "T_mult": 2},
    "OneCycleLR": {"max_lr": 0.5, "total_steps": 9},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.2, "step_size_up": 2},
    "StepLR": {"step_size": 2},
    "PolynomialLR": {"total_iters": 4},
}


class ByWeights:
    """Follows the norm of the weights, or what ``reads`` names."""

    def __init__(self, optimizer: torch.optim.Optimizer, reads: str = "norm", at_once: bool = False) -> None:
        self.optimizer, self.reads = optimizer, reads
        if at_once:
            self.step()

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = sum(float(getattr(p, self.reads)()) for p in group["params"])


class ByMomentum:
    """Follows what the optimizer keeps of the gradients."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        kept = sum(float(state["momentum_buffer"].norm()) for state in self.optimizer.state.values())
        self.optimizer.param_groups[0]["lr"] = kept


def optimizer() -> torch.optim.Optimizer:
    groups = [
        {"params": [torch.nn.Parameter(torch.ones(2))]},
        {"params": [torch.nn.Parameter(torch.ones(3))]},
    ]
    return torch.optim.SGD(groups, 0.1, momentum=0.9)


@pytest.mark.parametrize("reads", ["norm", "grad", "numel"])
@pytest.mark.parametrize("at_once", [False, True])
def test_a_scheduler_that_reads_parameters_is_refused(reads: str, at_once: bool) -> None:
    hparams = HParams(
        lr_scheduler=f"{__name__}:ByWeights", lr_scheduler_args={"reads": reads, "at_once": at_once}
    )
    made = optimizer()
    before = [group["params"] for group in made.param_groups]
    with pytest.raises(JobError, match=rf"lr_scheduler '.*:ByWeights' reads '{reads}' of the optimizer's"):
        make_scheduler(hparams, made, 0, GroupState(made), None)()
    assert all(group["params"] is known for group, known in zip(made.param_groups, before, strict=True))


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_what_they_were(name: str) -> None:
    hparams = HParams(lr_scheduler=f"torch.optim.lr_scheduler:{name}", lr_scheduler_args=SCHEDULES[name])
    plain, ours = optimizer(), optimizer()
    schedule = getattr(lr_scheduler, name)(plain, **SCHEDULES[name])
    step = make_scheduler(hparams, ours, 0, GroupState(ours), None)
    for _ in range(8):
        for made in (plain, ours):
            made.step()
        schedule.step()
        step()
        assert [g["lr"] for g in ours.param_groups] == [g["lr"] for g in plain.param_groups]
        assert [g["momentum"] for g in ours.param_groups] == [g["momentum"] for g in plain.param_groups]


class Handing(lr_scheduler.StepLR):
    """Hands on to torch's what it is given, as a base class of several schedulers does."""

    def step(self, *args: Any, **others: Any) -> None:
        super().step(*args, **others)


def test_a_schedule_whose_step_may_take_more_is_taken() -> None:
    made = optimizer()
    hparams = HParams(lr_scheduler=f"{__name__}:Handing", lr_scheduler_args={"step_size": 1})
    before = made.param_groups[0]["lr"]
    step = make_scheduler(hparams, made, 0, GroupState(made), None)
    made.step()
    step()
    assert made.param_groups[0]["lr"] == pytest.approx(0.1 * before)


def test_a_scheduler_that_reads_what_the_optimizer_keeps_is_refused() -> None:
    made = optimizer()
    step = make_scheduler(HParams(lr_scheduler=f"{__name__}:ByMomentum"), made, 0, GroupState(made), None)
    before = made.state
    with pytest.raises(JobError, match="ByMomentum' reads the optimizer's state, and a schedule depends"):
        step()
    assert made.state is before


class Walking(lr_scheduler.LRScheduler):
    """Walks at random."""

    walk = 1.0

    def get_lr(self) -> list[float | torch.Tensor]:
        self.walk += random.random() + float(np.random.rand()) + float(torch.rand(()))
        return [base * self.walk for base in self.base_lrs]


def test_a_schedule_that_draws_is_the_same_where_it_goes_through_the_steps_again() -> None:
    hparams = HParams(lr_scheduler=f"{__name__}:Walking")
    rates = []
    for steps in (0, 4):
        made = optimizer()
        torch.rand(steps)  # each process has drawn something else by then
        step = make_scheduler(hparams, made, steps, GroupState(made), None)
        for _ in range(steps, 6):
            step()
        rates.append([group["lr"] for group in made.param_groups])
    assert rates[0] == rates[1]


class FailsLate(lr_scheduler.LRScheduler):
    """As one that is told of fewer steps than there are."""

    def get_lr(self) -> list[float | torch.Tensor]:
        if self.last_epoch > 8:
            raise IndexError("no such step")
        return self.base_lrs


@pytest.mark.parametrize(
    ("name", "says"),
    [("ByMomentum", "reads the optimizer's state"), ("FailsLate", "IndexError: no such step")],
)
def test_a_trial_that_takes_few_steps_refuses_a_schedule(name: str, says: str) -> None:
    hparams = HParams(epochs=2, lr_scheduler=f"{__name__}:{name}")
    job = Job(
        "scheduled",
        load_model="changing_late:model",
        load_dataloader="changing_late:data",
        loss_function="changing_late:loss",
        model_args={"what": ""},
        hparams=hparams,
    )
    alone = Ranks(rank=0, size=1, device=torch.device("cpu"))
    with pytest.raises(JobError, match=says):
        check(TrainRequest(job=job, technique="single"), alone)
