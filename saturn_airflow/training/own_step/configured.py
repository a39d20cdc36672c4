"""The optimizers and schedulers that a model configures itself, in the forms that Lightning knows."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from saturn_airflow.launch.users_code import of_the_job
from saturn_airflow.model.errors import JobError
from saturn_airflow.model.jobs import HParams, Job
from saturn_airflow.training.functions import FUNCTIONS

_FORMS = (
    "return an optimizer, a list of them, two lists (optimizers and schedulers), or mappings with "
    "'optimizer' and 'lr_scheduler'"
)
_OPTIONS = ("scheduler", "interval", "frequency", "monitor", "name", "strict")


@dataclass
class Scheduled:
    """A scheduler and when to step it.

    :param per_epoch: at the end of an epoch, otherwise after each step; every ``frequency`` of them.
    :param monitor: the metric of the last evaluation that it is stepped with.
    """

    scheduler: Any
    per_epoch: bool = True
    frequency: int = 1
    monitor: str | None = None


def check_hparams(hparams: HParams) -> None:
    """Check that nothing is said of an optimizer where the model configures its own.

    :raises JobError: naming what would have no effect.
    """
    if wrong := hparams.of_no_effect():
        raise JobError(wrong)


def configured(
    model: nn.Module, job: Job, total_steps: int | None
) -> tuple[list[torch.optim.Optimizer], list[Scheduled]]:
    """What ``model.configure_optimizers`` returns.

    :param total_steps: handed to it where it has a parameter of that name.
    :raises JobError: when it can't be used, or the hyper-parameters say something else.
    """
    check_hparams(job.hparams)
    with of_the_job("configure_optimizers"):
        configure: Any = model.configure_optimizers
        wanted = inspect.signature(configure).parameters
        returned = configure(**({"total_steps": total_steps} if "total_steps" in wanted else {}))
    optimizers, schedulers = _read(returned)
    named = {id(p) for p in model.parameters()}
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise JobError(f"configure_optimizers returned a {type(optimizer).__name__}; {_FORMS}")
        if not all(id(p) in named for group in optimizer.param_groups for p in group["params"]):
            raise JobError(
                f"configure_optimizers returned a {type(optimizer).__name__} over what is no parameter of "
                "the model, so that no checkpoint would have it; make it a part of the model"
            )
    if not optimizers:
        raise JobError(f"configure_optimizers returned no optimizer; {_FORMS}")
    return optimizers, schedulers


def _read(returned: Any) -> tuple[list[Any], list[Scheduled]]:
    if isinstance(returned, Mapping):
        returned = [returned]
    two_lists = isinstance(returned, tuple | list) and len(returned) == 2
    if two_lists and all(isinstance(part, tuple | list) for part in returned):
        return list(returned[0]), [_scheduled(one) for one in returned[1]]
    given = list(returned) if isinstance(returned, Sequence) else [returned]
    optimizers: list[Any] = []
    schedulers: list[Scheduled] = []
    for one in given:
        if isinstance(one, Mapping):
            if unknown := [key for key in one if key not in ("optimizer", "lr_scheduler", "monitor")]:
                raise JobError(f"configure_optimizers returned a mapping with {unknown[0]!r}; {_FORMS}")
            optimizers.append(one.get("optimizer"))
            if one.get("lr_scheduler") is not None:
                schedulers.append(_scheduled(one["lr_scheduler"], one.get("monitor")))
        elif one is not None:
            optimizers.append(one)
    return optimizers, schedulers


def _scheduled(given: Any, monitor: str | None = None) -> Scheduled:
    options: Mapping[str, Any] = given if isinstance(given, Mapping) else {"scheduler": given}
    if unknown := [key for key in options if key not in _OPTIONS]:
        raise JobError(
            f"configure_optimizers gave a scheduler {unknown[0]!r}; what is known is {', '.join(_OPTIONS)}"
        )
    interval, frequency = options.get("interval", "epoch"), options.get("frequency", 1)
    if interval not in ("epoch", "step") or not isinstance(frequency, int) or frequency < 1:
        raise JobError(
            f"configure_optimizers gave a scheduler the interval {interval!r}, the frequency {frequency!r}; "
            "the interval is 'epoch' or 'step', the frequency a whole number of at least 1"
        )
    scheduler, monitor = options.get("scheduler"), options.get("monitor", monitor)
    for method in ("step", "state_dict", "load_state_dict"):
        if not callable(getattr(scheduler, method, None)):
            raise JobError(f"configure_optimizers gave a scheduler that has no {method}(): {scheduler!r:.80}")
    plateau = isinstance(scheduler, ReduceLROnPlateau)
    if plateau and (monitor is None or interval != "epoch"):
        raise JobError(
            "ReduceLROnPlateau follows a metric of the evaluation: say which, "
            '{"scheduler": ..., "monitor": "eval_loss"}, with the interval "epoch"'
        )
    return Scheduled(scheduler, interval == "epoch", frequency, monitor if plateau else None)


def functions_of(schedulers: Sequence[Scheduled]) -> dict[str, Any]:
    """The functions that schedulers go by, such as a LambdaLR's, by where they are."""
    found: dict[str, Any] = {}
    waiting = [(f"scheduler {number}", one.scheduler) for number, one in enumerate(schedulers)]
    while waiting:
        path, scheduler = waiting.pop()
        for name, value in getattr(scheduler, "__dict__", {}).items():
            for number, part in enumerate(value if isinstance(value, list | tuple) else [value]):
                where = f"{path}.{name}[{number}]"
                if isinstance(part, FUNCTIONS):
                    found[where] = part
                elif isinstance(part, LRScheduler):  # as in a SequentialLR
                    waiting.append((where, part))
    return found


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step wants to compute losses by itself."""
    return "closure" in _required(optimizer.step) or isinstance(optimizer, torch.optim.LBFGS)


def _required(function: Any) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
