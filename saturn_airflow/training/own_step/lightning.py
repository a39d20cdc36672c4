"""Lightning's ``LightningModule`` without its ``Trainer``: what it asks of one, Saturn answers or refuses.

A model of plain torch needs nothing of this. The names of attributes and methods are those of Lightning 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from saturn_airflow.model.errors import JobError
from saturn_airflow.model.jobs import HParams
from saturn_airflow.training.own_step import metric_objects
from saturn_airflow.training.own_step.configured import Scheduled
from saturn_airflow.training.own_step.metric_objects import MetricObjects

_METHODS = (
    *("log", "log_dict", "optimizers", "lr_schedulers", "manual_backward", "all_gather", "clip_gradients"),
    "print",
)
#: What every LightningModule has of its own, or gets from :func:`attach`.
ATTRIBUTES = frozenset(
    (
        *_METHODS,
        *("_trainer", "_fabric", "_fabric_optimizers", "_example_input_array", "_automatic_optimization"),
        *("_current_fx_name", "_param_requires_grad_state", "_metric_attributes", "_compiler_ctx"),
        *("_log_hyperparams", "_dtype", "_device", "_device_mesh", "_jit_is_scripting", "_strict_loading"),
        *("_hparams", "_hparams_name", "_hparams_initial", "prepare_data_per_node", "trainer"),
        "allow_zero_length_dataloader_with_multiple_devices",
        "_should_prevent_trainer_and_dataloaders_deepcopy",
    )
)
# Arguments of ``self.log`` that change nothing here: all numbers go to MLflow, as means over the devices.
_HARMLESS = {"prog_bar", "logger", "sync_dist", "add_dataloader_idx", "enable_graph"}


class Stepping(Protocol):
    """What a LightningModule may ask of the training that takes its steps.

    :ivar epoch: where training stands, from 0, and
    :ivar number: the step of all, from 0.
    :ivar total_steps: of the whole job; None where the data has no length.
    :ivar automatic: whether Saturn calls backward and steps the optimizer.
    :ivar is_first: whether this is the first rank.
    :ivar samples: of the batch that is evaluated; None where they do not count.
    :ivar log: numbers that were logged since the last step.
    """

    model: nn.Module
    hparams: HParams
    epoch: int
    number: int
    total_steps: int | None
    automatic: bool
    is_first: bool
    samples: int | None
    log: dict[str, torch.Tensor]
    metric_objects: MetricObjects
    optimizers: list[torch.optim.Optimizer]
    schedulers: list[Scheduled]


def is_lightning(model: nn.Module) -> bool:
    """Whether ``model`` is a LightningModule, of either of its two packages."""
    return any(
        cls.__name__ == "LightningModule" and "lightning" in cls.__module__ for cls in type(model).__mro__
    )


def train_mode(model: nn.Module) -> None:
    """Have ``model`` in training mode; a LightningModule is left as it was made, as its trainer leaves it:
    what it has frozen with ``eval()`` stays so."""
    if not is_lightning(model):
        model.train()


def attach(model: Any, own: Stepping) -> None:
    """Give a LightningModule what it would have of its trainer."""
    model._trainer = Trainer(own)
    logger = _Logger(own)
    model.log, model.log_dict = logger.log, logger.log_dict
    model.optimizers = lambda use_pl_optimizer=True: _one_or_all(own.optimizers)
    model.lr_schedulers = lambda: _one_or_all([one.scheduler for one in own.schedulers])
    model.manual_backward = _backward
    model.clip_gradients = _clip
    model.all_gather = _refused("all_gather", "saturn_airflow.training.whole_batch has the whole batch")
    model.print = _print_once(own)


class Trainer:
    """What ``self.trainer`` of a LightningModule answers.

    :raises JobError: for an attribute that it does not have.
    """

    def __init__(self, own: Stepping) -> None:
        self._own = own
        self.sanity_checking = False

    @property
    def current_epoch(self) -> int:
        """The epoch, from 0."""
        return self._own.epoch

    @property
    def global_step(self) -> int:
        """Optimizer steps before this one; with several optimizers Lightning would add theirs up."""
        if not self._own.automatic:
            raise JobError(
                "self.global_step: with automatic_optimization = False, count the steps in a buffer"
            )
        return self._own.number

    @property
    def estimated_stepping_batches(self) -> int:
        """Steps of the whole job."""
        if self._own.total_steps is None:
            raise JobError("self.trainer.estimated_stepping_batches: the data has no length")
        return self._own.total_steps

    @property
    def max_epochs(self) -> int | None:
        """Passes over the data, where the job is so long."""
        return self._own.hparams.epochs

    @property
    def max_steps(self) -> int:
        """Steps, where the job says so, otherwise -1."""
        return -1 if self._own.hparams.batches is None else self._own.hparams.batches

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """All that the model configured."""
        return list(self._own.optimizers)

    @property
    def training(self) -> bool:
        """Whether a training step is taken."""
        return self._own.model.training

    @property
    def validating(self) -> bool:
        """Whether the model is evaluated."""
        return not self._own.model.training

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise JobError(
            f"self.trainer.{name} is Lightning's; Saturn's has current_epoch, global_step, max_epochs, "
            "max_steps, estimated_stepping_batches, optimizers, training, validating and sanity_checking"
        )


class _Logger:
    """``self.log`` and ``self.log_dict``."""

    def __init__(self, own: Stepping) -> None:
        self._own = own

    def log(self, name: str, value: Any, *positional: Any, **arguments: Any) -> None:
        """Note a number: of a step where the model is trained, of the evaluation where it is not."""
        if positional:
            raise JobError("self.log: give what comes after the value by name")
        if metric_objects.is_metric(value):
            self._log_object(name, value, arguments)
            return
        self._check(name, arguments)
        self._own.log[name] = metric_objects.number(value, name)

    def log_dict(self, dictionary: Mapping[str, Any], *positional: Any, **arguments: Any) -> None:
        """Note several numbers."""
        # The names of a MetricCollection have its prefix, and its parts the state that they share.
        shared = metric_objects.is_metric(dictionary)
        items = dictionary.items(**({"keep_base": False, "copy_state": False} if shared else {}))
        for name, value in items:
            self.log(name, value, *positional, **arguments)

    def _log_object(self, name: str, metric: Any, arguments: dict[str, Any]) -> None:
        """Note a metric object: its value of each batch, or of all when the epoch or the evaluation ends."""
        arguments = {key: value for key, value in arguments.items() if key != "metric_attribute"}
        training = self._own.model.training
        on_step, on_epoch = training, not training
        if training:
            given_step, given_epoch = arguments.pop("on_step", None), arguments.pop("on_epoch", None)
            on_step = on_step if given_step is None else bool(given_step)
            on_epoch = on_epoch if given_epoch is None else bool(given_epoch)
        self._check(name, arguments)
        both = on_step and on_epoch
        self._own.metric_objects.log(f"{name}_epoch" if both else name, metric, at_end=on_epoch)
        if on_step:
            self._own.log[f"{name}_step" if both else name] = metric_objects.of_batch(name, metric)

    def _check(self, name: str, arguments: Mapping[str, Any]) -> None:
        training = self._own.model.training
        samples = not training and self._own.samples
        accepted: dict[str, tuple[Any, ...]] = {
            "on_step": (None, training),
            "on_epoch": (None, not training),
            "reduce_fx": ("mean", torch.mean),
            "batch_size": (None, self._own.samples if samples else arguments.get("batch_size")),
            "sync_dist_group": (None,),
            "metric_attribute": (None,),
            "rank_zero_only": (False,),
        }
        for argument, value in arguments.items():
            if argument in _HARMLESS or value in accepted.get(argument, ()):
                continue
            when = "training_step" if training else "validation_step"
            raise JobError(
                f"self.log({name!r}, {argument}={value!r}) in {when} is not what Saturn does: it logs means, "
                "by step in training and over the evaluation in validation"
            )


def _one_or_all(values: list[Any]) -> Any:
    if not values:
        return None
    return values[0] if len(values) == 1 else values


def _backward(loss: torch.Tensor, *arguments: Any, **named: Any) -> None:
    loss.backward(*arguments, **named)  # type: ignore[no-untyped-call]


def _clip(
    optimizer: torch.optim.Optimizer,
    gradient_clip_val: float | None = None,
    gradient_clip_algorithm: str | None = None,
) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if gradient_clip_val is None:
        return
    if gradient_clip_algorithm in (None, "norm"):
        nn.utils.clip_grad_norm_(parameters, gradient_clip_val)
    elif gradient_clip_algorithm == "value":
        nn.utils.clip_grad_value_(parameters, gradient_clip_val)
    else:
        raise JobError(
            f"clip_gradients: the algorithm is {gradient_clip_algorithm!r}; it is 'norm' or 'value'"
        )


def _print_once(own: Stepping) -> Callable[..., None]:
    def print_once(*values: Any, **arguments: Any) -> None:
        if own.is_first:
            print(*values, **arguments)

    return print_once


def _refused(name: str, instead: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise JobError(f"self.{name} is Lightning's; {instead}")

    return refuse
