"""Optimizers and learning-rate schedulers, from a job's hyper-parameters."""

from __future__ import annotations

import inspect
import itertools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from saturn_airflow.launch.request import DoesNotFit
from saturn_airflow.launch.users_code import of_the_job
from saturn_airflow.model import references
from saturn_airflow.model.errors import JobError
from saturn_airflow.model.jobs import HParams, Job
from saturn_airflow.parallelism.parallel import Parallel
from saturn_airflow.training import rng
from saturn_airflow.training.guarding.users_state import UsersState
from saturn_airflow.training.optim import own_classes
from saturn_airflow.training.optim.elementwise import refuse_coupled
from saturn_airflow.training.optim.group_state import GroupState
from saturn_airflow.training.optim.hidden_weights import hidden_weights
from saturn_airflow.training.optim.in_parts import BY_NUMBER
from saturn_airflow.training.optim.mixing import lacks_some, refuse_mixing

# torch's optimizers that can update all parameters in one kernel, on CPU and CUDA alike. SGD's kernel raises
# at sparse gradients, and with momentum at a parameter whose first gradient comes later than those of others.
_FUSED = (torch.optim.Adam, torch.optim.AdamW)

# What torch says of an operation that it can't do on split tensors (DTensor), or not between them and others.
_ABOUT_SPLIT = re.compile(r"\baten\.|DTensor|sharding strategy")

# What schedulers call the number of all steps.
_TOTALS = ("total_steps", "num_training_steps")

#: The optimizer's parameter groups with names in the place of parameters.
Groups = Sequence[dict[str, Any]]


def parameter_groups(hparams: HParams, model: nn.Module) -> Groups:
    """The parameter groups of the whole model, before a technique takes it apart.

    :raises JobError: when nothing is to be trained, or a group holds what is no parameter of the model.
    """
    if not any(p.requires_grad for p in model.parameters()):
        raise JobError(
            "the model has no trainable parameter; leave requires_grad=True on what is to be trained"
        )
    if hparams.parameter_groups is None:
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        given = set(model.parameters())
        if left_out := [name for name, p in trained.items() if p not in given]:
            raise JobError(
                f"{type(model).__name__}.parameters() leaves out {left_out[0]!r}, which asks for gradients; "
                "set requires_grad=False on what is not to be trained, or choose what is by "
                "HParams(parameter_groups=...)"
            )
        return [{"params": list(trained)}]
    name_of = {p: name for name, p in model.named_parameters()}
    with of_the_job(f"parameter_groups {hparams.parameter_groups!r}"):
        groups = list(references.load(str(hparams.parameter_groups))(model))
    named: list[dict[str, Any]] = []
    for group in groups:
        options = dict(group) if isinstance(group, dict) else {"params": [group]}
        parameters = options.pop("params", [None])
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        # As torch's optimizers take what named_parameters() gives.
        parameters = [p[1] if isinstance(p, tuple) and len(p) == 2 else p for p in parameters]
        if not all(isinstance(p, torch.Tensor) and p in name_of for p in parameters):
            raise JobError(
                f"parameter_groups {hparams.parameter_groups!r} returned something that is no parameter of "
                'the model; return dictionaries such as {"params": [...], "lr": 0.1}, and make what else is '
                "trained, such as weights of a loss, a part of the model"
            )
        named.append({"params": [name_of[p] for p in parameters], **options})
    return named


def frozen(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that no optimizer of ``model`` gets, by name."""
    return {name: p for name, p in model.named_parameters() if not p.requires_grad}


def refuse_thawed(untrained: Mapping[str, nn.Parameter]) -> None:
    """See that what was :func:`frozen` when the optimizer was made is so still.

    :raises JobError: when some of it is trained by now: the optimizer does not have it.
    """
    if any(p.requires_grad for p in untrained.values()):
        name = next(name for name, p in untrained.items() if p.requires_grad)
        raise JobError(
            f"the model asks for gradients of {name!r} by now, which did not require any when its optimizer "
            "was made, and would not be trained. Leave requires_grad=True in load_model on all that is ever "
            "to be trained, and set it to False in forward() as long as it is not"
        )


def learning_rates(optimizer: torch.optim.Optimizer) -> list[float | None]:
    """The present learning rate of each group; None where one has none, as some find it by themselves."""
    rates = (group.get("lr") for group in optimizer.param_groups)
    return [None if rate is None else float(rate) for rate in rates]


def make_optimizer(
    hparams: HParams, groups: Groups, parallel: Parallel, job: Job | None = None
) -> torch.optim.Optimizer:
    """The job's optimizer over those parameters that this rank holds.

    :param job: whose code is to remember nothing of steps that are only tried.
    :raises JobError: when it can't be made, or needs a closure.
    :raises DoesNotFit: when it needs whole parameters, or all of them, and this rank holds some.
    """
    cls = references.load(str(hparams.optimizer))
    here = parallel.trainable()
    arguments: dict[str, Any] = {"lr": hparams.lr, **deepcopy(hparams.optimizer_args)}
    real = not any(p.is_complex() for p in here.values())
    if real and parallel.optimizer_kernels != "many at once" and cls in _FUSED and "foreach" not in arguments:
        arguments.setdefault("fused", True)
    mixed = parallel.optimizer_kernels == "two kinds" and not arguments.get("fused")
    if mixed and "foreach" in inspect.signature(cls).parameters:
        arguments["foreach"] = False
    own = [{**group, "params": [here[name] for name in group["params"] if name in here]} for group in groups]
    try:
        optimizer = cls(own, **arguments)
    except Exception as error:
        raise JobError(f"optimizer {hparams.optimizer!r} does not take {arguments}: {error}") from error
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise JobError(
            f"optimizer {hparams.optimizer!r} needs a closure; choose one that steps on gradients alone"
        )
    assert isinstance(optimizer, torch.optim.Optimizer)
    if all(callable(getattr(optimizer, mode, None)) for mode in ("train", "eval")):
        raise JobError(
            f"optimizer {hparams.optimizer!r} evaluates other weights than it trains, and nobody calls its "
            "train() and eval() here; make it in configure_optimizers of a model with own_step=True, and "
            "call them in its hooks on_train_epoch_start, on_validation_epoch_start and _end, and "
            "on_train_epoch_end"
        )
    if lacks_some(groups, here):
        what = f"optimizer {hparams.optimizer!r}"
        with UsersState(job, parallel.model).put_back() if job else nullcontext():
            known = cls in BY_NUMBER
            refuse_coupled(what, lambda groups: cls(groups, **arguments), own, known=known)
            refuse_mixing(what, lambda groups: cls(groups, **arguments), own, known=known)
    return optimizer


def take_step(optimizer: torch.optim.Optimizer, hparams: HParams, parallel: Parallel) -> None:
    """Let the optimizer, which is the job's own code, take its step.

    :raises JobError: when it raises on plain tensors.
    :raises DoesNotFit: when it can't step on parameters that are split over devices.
    """
    if parallel.optimizer_kernels == "fused":
        with of_the_job(f"optimizer {hparams.optimizer!r}"):
            optimizer.step()
        return
    try:
        if parallel.optimizer_kernels == "two kinds" and optimizer.defaults.get("fused"):
            for split in (True, False):
                with _only(optimizer, split):
                    optimizer.step()
        else:
            optimizer.step()
    except RuntimeError as error:
        if not _ABOUT_SPLIT.search(str(error)):
            raise
        raise DoesNotFit(
            f"optimizer {hparams.optimizer!r} can't step on parameters that are split over devices "
            f"({str(error).splitlines()[0]:.150}); use another one, or a technique that keeps them whole"
        ) from error


@contextmanager
def _only(optimizer: torch.optim.Optimizer, split: bool) -> Iterator[None]:
    """Have it see those parameters only that are split over devices, or those that are not.

    One kernel takes no mixture, and to take each parameter by itself has a price for each operation on it.
    """
    given = [group["params"] for group in optimizer.param_groups]
    try:
        for group, parameters in zip(optimizer.param_groups, given, strict=True):
            group["params"] = [p for p in parameters if isinstance(p, DTensor) is split]
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, given, strict=True):
            group["params"] = parameters


def scheduler_of(hparams: HParams, optimizer: torch.optim.Optimizer, total: int | None) -> Any | None:
    """The job's scheduler of ``optimizer``; None where it has none.

    :param total: steps of the whole job, for schedulers that ask for them; None where nobody knows.
    :raises JobError: when it can't be made, or wants a metric in each step.
    """
    if hparams.lr_scheduler is None:
        return None
    cls, what = references.load(str(hparams.lr_scheduler)), f"lr_scheduler {hparams.lr_scheduler!r}"
    given = deepcopy(dict(hparams.lr_scheduler_args))
    if (name := _steps_left_out(cls, given)) is not None:
        if total is None:
            raise JobError(
                f"{what} asks for {name}, and the data has no length; say it in lr_scheduler_args, or say "
                "HParams(batches=...)"
            )
        given[name] = total
    try:
        scheduler = cls(optimizer, **given)
        wanted = [p for p in inspect.signature(scheduler.step).parameters.values() if _is_needed(p)]
    except JobError:
        raise
    except Exception as error:
        raise JobError(f"{what} does not take {given}: {error}") from error
    if wanted:
        raise JobError(
            f"{what} wants {wanted[0].name!r} in each step; choose one that follows the steps alone"
        )
    return scheduler


def _is_needed(parameter: inspect.Parameter) -> bool:
    """Whether a call without it fails."""
    any_number = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not any_number


def _steps_left_out(scheduler: Any, given: Mapping[str, Any]) -> str | None:
    """The parameter of ``scheduler`` that asks for the steps of the whole job, where ``given`` lacks it."""
    if {"epochs", "steps_per_epoch"} & given.keys():  # which OneCycleLR takes instead
        return None
    takes = inspect.signature(scheduler).parameters
    return next((name for name in _TOTALS if name in takes and name not in given), None)


def make_scheduler(
    hparams: HParams,
    optimizer: torch.optim.Optimizer,
    steps: int,
    kept: GroupState,
    total: int | None,
) -> Callable[[], None]:
    """What to call after each optimizer step, with the learning rates as they are after ``steps`` of them.

    Schedulers are functions of the number of steps, so going through the steps again restores them exactly;
    what they draw follows from that number, too.

    :param total: as for :func:`scheduler_of`.
    :param kept: is told what the scheduler writes into the optimizer's groups.
    :raises JobError: when the scheduler can't be made, wants a metric in each step, or looks at the weights.
    """
    made: list[Any] = []
    numbers = itertools.count()
    what = f"lr_scheduler {hparams.lr_scheduler!r}"
    may_draw = own_classes.is_own(str(hparams.lr_scheduler).partition(":")[0])

    def seed() -> None:
        if may_draw:
            rng.seed(hparams.seed, "schedule", next(numbers))

    seed()
    with hidden_weights(optimizer, what):
        kept.scheduled(lambda: made.append(scheduler_of(hparams, optimizer, total)))
    (scheduler,) = made
    if scheduler is None:
        return lambda: None

    def step() -> None:
        seed()
        with of_the_job(what), hidden_weights(optimizer, what):
            kept.scheduled(scheduler.step)

    with warnings.catch_warnings():
        # torch warns that the optimizer has not stepped yet, which a resumed one need not have.
        warnings.simplefilter("ignore", UserWarning)
        for _ in range(steps):
            step()
    return step
