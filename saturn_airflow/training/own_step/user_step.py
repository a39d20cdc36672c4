"""One training step of the model's own: its hooks, its optimizers, and what it logs."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from saturn_airflow.launch.request import DoesNotFit
from saturn_airflow.launch.users_code import of_the_job
from saturn_airflow.model.errors import JobError
from saturn_airflow.model.jobs import Job
from saturn_airflow.model.metrics import TAKEN
from saturn_airflow.model.plain_numbers import is_number
from saturn_airflow.parallelism.parallel import Parallel
from saturn_airflow.training import precision, rng
from saturn_airflow.training.batches import GlobalBatch
from saturn_airflow.training.guarding.randomness import each_pass_anew
from saturn_airflow.training.optim import optimizers
from saturn_airflow.training.own_step import hooks, lightning
from saturn_airflow.training.own_step.configured import Scheduled, configured, needs_closure
from saturn_airflow.training.own_step.metric_objects import MetricObjects
from saturn_airflow.training.without_group import without_group

# What is the loss where a step returns none, by what was logged.
_LOSSES = {"training_step": ("loss", "train_loss"), "validation_step": ("eval_loss", "loss", "val_loss")}


@dataclass
class StepResult:
    """What a step came to.

    :param loss: the mean over the samples it was given.
    :param logged: further numbers by their names, means as well.
    """

    loss: torch.Tensor
    logged: dict[str, torch.Tensor] = field(default_factory=dict)


class OwnStep:
    """A model with its training step, its optimizers and its schedulers.

    :param parallel: holds the model, on the device that it is trained on.
    :param total_steps: of the whole job; None where the data has no length.
    :raises JobError: when the model can't be trained as it is written.
    """

    def __init__(self, job: Job, parallel: Parallel, total_steps: int | None) -> None:
        self.model = model = parallel.model
        self.hparams = hparams = job.hparams
        self._device, self._devices = parallel.ranks.device, parallel.ranks.size
        self.total_steps = total_steps
        self.is_first = parallel.ranks.is_first
        #: Where training stands: the epoch, and the step of all, from 0.
        self.epoch = self.number = 0
        self.automatic = bool(getattr(model, "automatic_optimization", True))
        #: Samples of the batch that is evaluated; None where they do not count.
        self.samples: int | None = None
        #: Numbers that the model logged by ``self.log`` since they were taken out.
        self.log: dict[str, torch.Tensor] = {}
        self.metric_objects = MetricObjects(model, parallel.ranks.size)
        self._steps = self._epochs = 0
        if lightning.is_lightning(model):
            lightning.attach(model, self)
        self.schedulers: list[Scheduled]
        if hooks.is_own(model, "configure_optimizers"):
            self.optimizers, self.schedulers = configured(model, job, total_steps)
        else:
            groups = optimizers.parameter_groups(hparams, model)
            optimizer = optimizers.make_optimizer(hparams, groups, parallel)
            self.optimizers = [optimizer]
            scheduler = optimizers.scheduler_of(hparams, optimizer, total_steps)
            self.schedulers = [] if scheduler is None else [Scheduled(scheduler, per_epoch=False)]
        self._check()

    def _check(self) -> None:
        if self.automatic and len(self.optimizers) > 1:
            raise JobError(
                f"configure_optimizers returned {len(self.optimizers)} optimizers: set "
                "automatic_optimization = False on the model, and call zero_grad, backward and step in "
                "training_step"
            )
        for name in (type(one).__name__ for one in self.optimizers if needs_closure(one)):
            if self.automatic:
                raise JobError(
                    f"{name} needs a closure, which Saturn does not give it: set automatic_optimization = "
                    "False on the model, and call step(closure) in training_step"
                )
            if self._devices > 1:
                raise DoesNotFit(
                    f"{name} steps by the losses that its closure returns, of which each device knows those "
                    "of its own samples"
                )
        if not self.automatic and self.hparams.clip_grad_norm is not None:
            raise JobError(
                "clip_grad_norm is for the step that Saturn takes; with automatic_optimization = False "
                "call torch.nn.utils.clip_grad_norm_ in training_step"
            )

    def place(self, batch: GlobalBatch, step: int) -> None:
        """Note where training stands: at ``step``, from 0, which is to be taken on ``batch``."""
        self.epoch, self.number = batch.position.epoch, step

    def take(self, batch: Any, batch_idx: int, *, schedule: bool = True) -> StepResult:
        """Train on a batch, which is on any device.

        :param schedule: whether schedulers are stepped, where Saturn does it.
        :raises JobError: when the step raises, or returns no loss.
        """
        batch = precision.place(batch, self._device, self.hparams.precision)
        if hooks.call(self.model, "on_train_batch_start", batch, batch_idx) == -1:
            raise JobError("on_train_batch_start returned -1, which skips batches; return None")
        autocast = precision.autocast(self.hparams.precision, self._device)
        with of_the_job("training_step"), autocast, without_group(), each_pass_anew():
            returned = _call_step(self.model.training_step, batch, batch_idx)
        taken = self._taken(returned, "training_step")
        if self.automatic:
            self._optimize(taken.loss)
            if schedule:
                self._step_schedulers()
        hooks.call(self.model, "on_train_batch_end", returned, batch, batch_idx)
        late = _named_freely(self.logged(), "on_train_batch_end")
        return StepResult(taken.loss.detach(), {**taken.logged, **late})

    def evaluate(self, batch: Any, batch_idx: int, samples: int | None = None) -> StepResult:
        """What the model's ``validation_step`` says of a batch; a loss of NaN where it says nothing of it.

        :param samples: of the batch, where they count; which is what ``self.log`` may give as ``batch_size``.
        """
        self.samples = samples
        batch = precision.place(batch, self._device, self.hparams.precision)
        autocast = precision.autocast(self.hparams.precision, self._device)
        with of_the_job("validation_step"), autocast, without_group():
            returned = _call_step(self.model.validation_step, batch, batch_idx)
        return self._taken(returned, "validation_step")

    def end_evaluation(self, loss: float) -> tuple[float, dict[str, float]]:
        """After the batches of the evaluation, of which the steps said ``loss``; NaN where they said none.

        :returns: the loss, which is what is logged now as ``eval_loss``, or also ``loss`` or ``val_loss``
            where the steps said none; and further numbers.
        """
        hooks.call(self.model, "on_validation_epoch_end")
        logged = self.logged() | self.metric_objects.end()
        names = _LOSSES["validation_step"] if math.isnan(loss) else ("eval_loss",)
        loss = float(next((logged[name] for name in names if name in logged), loss))
        others = _named_freely(logged, "on_validation_epoch_end")
        return loss, {name: float(value) for name, value in others.items()}

    def metrics_of_epoch(self) -> dict[str, float]:
        """What metric objects that were logged came to over the epoch's batches; they begin anew."""
        ended = _named_freely(self.metric_objects.end(), "training_step")
        return {name: float(value) for name, value in ended.items()}

    def end_epoch(self, metrics: Mapping[str, float | None]) -> None:
        """After an epoch's batches and its evaluation, whose ``metrics`` a scheduler may follow."""
        hooks.call(self.model, "on_train_epoch_end")
        if logged := self.logged():
            raise JobError(
                f"on_train_epoch_end logged {sorted(logged)[0]!r}; log it in training_step, by step, or in "
                "the validation's hooks"
            )
        self._epochs += 1
        if not self.automatic:
            return
        for one in self.schedulers:
            if not one.per_epoch or self._epochs % one.frequency:
                continue
            if one.monitor is None:
                with of_the_job(f"scheduler {type(one.scheduler).__name__}"):
                    one.scheduler.step()
                continue
            value = metrics.get(one.monitor)
            if value is None:
                known = ", ".join(name for name, known in metrics.items() if known is not None)
                raise JobError(
                    f"{type(one.scheduler).__name__} follows {one.monitor!r}, which was not measured; there "
                    f"is {known or 'nothing'}"
                )
            one.scheduler.step(value)

    def counts(self) -> list[int]:
        """How many steps and epochs schedulers have seen."""
        return [self._steps, self._epochs]

    def set_counts(self, counts: list[int]) -> None:
        """Continue with what :meth:`counts` told."""
        self._steps, self._epochs = counts

    @contextmanager
    def schedulers_held(self) -> Iterator[None]:
        """While it lasts, schedulers do nothing, whoever steps them."""
        before = [(one.scheduler, vars(one.scheduler).get("step")) for one in self.schedulers]
        self.hold_schedulers()
        try:
            yield
        finally:
            for scheduler, step in before:
                del scheduler.step
                if step is not None:
                    scheduler.step = step

    def hold_schedulers(self) -> None:
        """Have schedulers do nothing any more: a trial may go on after the last step they know of."""
        for one in self.schedulers:
            one.scheduler.step = _do_nothing

    def _optimize(self, loss: torch.Tensor) -> None:
        (optimizer,) = self.optimizers
        optimizer.zero_grad(set_to_none=True)
        with of_the_job("the backward pass of training_step's loss"):
            loss.backward()  # type: ignore[no-untyped-call]
        if self.hparams.clip_grad_norm is not None:
            # As Lightning does it: what is in no group has no part in it.
            trained = [p for group in optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(trained, self.hparams.clip_grad_norm)
        # What it draws is the same on all ranks.
        rng.seed(self.hparams.seed, "optimizer", self.number)
        with of_the_job(f"optimizer {type(optimizer).__name__}"):
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def _step_schedulers(self) -> None:
        self._steps += 1
        for one in self.schedulers:
            if not one.per_epoch and not self._steps % one.frequency:
                with of_the_job(f"scheduler {type(one.scheduler).__name__}"):
                    one.scheduler.step()

    def _taken(self, returned: Any, what: str) -> StepResult:
        """The loss and further numbers among what a step returned and logged."""
        training = what == "training_step"
        given = dict(returned) if isinstance(returned, Mapping) else {"loss": returned}
        loss = given.pop("loss", None)
        numbers = {str(key): value for key, value in given.items() if _is_number(value)}
        logged = self.logged() | {key: _number(value, f"{what}: {key!r}") for key, value in numbers.items()}
        # Who steps its optimizers itself, or validates, need not return a loss where it has logged one.
        if loss is None and not (training and self.automatic):
            loss = next((logged[name] for name in _LOSSES[what] if name in logged), None)
        if loss is None and training:
            raise JobError(
                'training_step returned no loss; return it as a scalar tensor, or as {"loss": ...}, so that '
                "it is reported and a NaN is noticed"
            )
        loss = _number(math.nan if loss is None else loss, f"{what}: the loss")
        if training and self.automatic and not loss.requires_grad:
            raise JobError(
                "training_step returned a loss that no trainable parameter takes part in; compute it from "
                "the model's outputs, without detach(), item() or no_grad()"
            )
        return StepResult(loss, _named_freely(logged, what))

    def logged(self) -> dict[str, torch.Tensor]:
        """What the model logged by ``self.log`` since this was asked last."""
        logged, self.log = dict(self.log), {}
        return logged


def _call_step(step: Any, batch: Any, batch_idx: int) -> Any:
    """A step need not ask for the batch's number."""
    takes = inspect.signature(step).parameters.values()
    places = [p for p in takes if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    alone = len(places) == 1 and not any(p.kind is p.VAR_POSITIONAL for p in takes)
    return step(batch) if alone else step(batch, batch_idx)


def _named_freely(logged: Mapping[str, torch.Tensor], what: str) -> dict[str, torch.Tensor]:
    """Without what is the loss itself.

    :raises JobError: for a name that means something else.
    """
    others = {name: value.detach() for name, value in logged.items() if name not in ("loss", "eval_loss")}
    if taken := [name for name in others if name in TAKEN]:
        raise JobError(f"{what}: {taken[0]!r} is what Saturn measures itself; give it another name")
    return others


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | torch.Tensor) and not (
        isinstance(value, torch.Tensor) and value.ndim
    )


def _number(value: Any, what: str) -> torch.Tensor:
    if isinstance(value, torch.Tensor) and not value.ndim:
        return value
    if is_number(value):
        return torch.tensor(float(value), dtype=torch.float64)
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
    raise JobError(f"{what} is a {type(value).__name__}{shape}; give a number or a scalar tensor")


def _do_nothing(*_: Any, **__: Any) -> None:
    pass
