"""What a job minimises: from a model and a batch to a sum of losses and what it is a sum over."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from numbers import Number
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from saturn_airflow.launch import job_log
from saturn_airflow.launch.users_code import of_the_job
from saturn_airflow.model import references
from saturn_airflow.model.errors import JobError
from saturn_airflow.model.jobs import Job
from saturn_airflow.parallelism.module_state import parameters_of
from saturn_airflow.training import precision
from saturn_airflow.training.ahead import PlacedAhead
from saturn_airflow.training.batches import Data
from saturn_airflow.training.guarding.randomness import each_pass_anew
from saturn_airflow.training.layout import MicroBatch, of_batch
from saturn_airflow.training.losses import means
from saturn_airflow.training.losses.rules import SAMPLES, LossMeans, Rule
from saturn_airflow.training.nested import tensors_in
from saturn_airflow.training.without_group import without_group


class Objective:
    """A job's loss as a (sum, count) pair, so that the shares of a batch add up to the whole.

    :param rule: how the losses of a batch's parts make up its own.
    """

    def __init__(self, job: Job, model: nn.Module, device: torch.device, rule: Rule = SAMPLES) -> None:
        self._loss_function = loss_function_of(job)
        self._name = f"loss_function {job.loss_function!r}" if job.loss_function else "the model"
        self._model_class = type(model)
        #: Names of the loss function's own parameters, which no optimizer has.
        self.untrained = _parameters_beside(model, self._loss_function)
        self._precision = job.hparams.precision
        #: The format that it is compared in.
        self.exact = precision.exact(self._precision, model)
        self._device = device
        self._data: Data | None = None
        self.rule = rule
        #: Samples of the global batch that is being computed.
        self.batch_samples = 0
        #: Whether its loss is a sum over its samples, as the host knows without asking the device; None where
        #: no loss has been computed here.
        self.counts_samples: bool | None = None
        self._ahead: PlacedAhead | None = None
        #: Who is told of the means in the loss, in the place of those who apply the rule.
        self.loss_means: LossMeans | None = None
        #: Who is shown the outputs of the model, the batch, and how many samples it has.
        self.seen: Callable[[Any, Any, int], None] = lambda outputs, batch, samples: None
        self._tally: torch.Tensor | None = None

    def on(self, device: torch.device) -> Objective:
        """The same objective on another device."""
        other = copy.copy(self)
        other._device, other._ahead = device, None
        return other

    def of(self, data: Data, rule: Rule | None = None) -> Objective:
        """The same objective for batches of ``data``."""
        other = copy.copy(self)
        other._data = data
        other.rule = self.rule if rule is None else rule
        return other

    def exactly(self) -> Objective:
        """The same objective as it is compared: without reduced precision where the model can do without."""
        other = copy.copy(self)
        other._precision, other._ahead = self.exact, None
        return other

    def begin(self, batch_samples: int) -> None:
        """Begin with a global batch of ``batch_samples`` samples."""
        self.batch_samples, self._tally = batch_samples, None
        self.counts_samples = None

    def end(self) -> torch.Tensor:
        """End with a global batch: what :func:`rules.check` wants to know of it, to be summed over ranks."""
        means.set_listener(None)
        return LossMeans(self.rule, device=self._device).tally() if self._tally is None else self._tally

    def take(self, batch: Any, samples: int, rows: range) -> MicroBatch:
        """The samples ``rows`` of a batch of ``samples``.

        :raises DoesNotFit: when the job's batches can't be cut.
        """
        assert self._data is not None
        return self._data.layout.take(batch, samples, rows)

    def prepare(self, batch: Any, samples: int) -> tuple[Any, int]:
        """A batch on the device, and its number of samples."""
        if self._ahead is not None:
            return self._ahead.take(batch), samples
        return precision.place(batch, self._device, self._precision), samples

    def prepare_ahead(self, batch: Any) -> None:
        """Have the next :meth:`prepare` find ``batch`` on the device, copied beside what is computed."""
        if self._device.type == "cuda":
            self._ahead = self._ahead or PlacedAhead(self._device, self._precision)
            self._ahead.put(batch)

    def inputs(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments that the model is called with.

        :raises JobError: when the batch is neither a mapping, nor a dataclass, nor a pair.
        """
        if dataclasses.is_dataclass(batch) and not isinstance(batch, Mapping | type):
            batch = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
        if isinstance(batch, Mapping):
            hide_labels = self._loss_function is not None
            return (), {key: value for key, value in batch.items() if not (hide_labels and key == "labels")}
        if isinstance(batch, list | tuple) and len(batch) == 2:
            return (batch[0],), {}
        raise JobError(
            f"the dataloader gave a {type(batch).__name__}"
            + (f" of {len(batch)}" if isinstance(batch, list | tuple) else "")
            + " as a batch; give a mapping of the model's arguments, or a pair (inputs, targets); a "
            "training_step of the model's own (own_step=True) gets any batch as it is"
        )

    def describe(self, batch: Any) -> list[dict[str, Any]]:
        """What the model is called with, JSON-ready: ``name``, ``dtype`` and ``shape`` of each tensor.

        The name is None where there is none. -1 stands for lengths that may be others: the number of samples,
        and those of integers, such as tokens. Labels are left out.
        """
        args, kwargs = self.inputs(batch)
        with job_log.muted():  # samples may be fetched for it
            layout = self._data.layout if self._data is not None else of_batch(batch, None)
        named: list[tuple[str | None, tuple[Any, ...], Any]] = [(None, (0,), value) for value in args]
        named += [(name, (name,), value) for name, value in kwargs.items()]
        return [
            {
                "name": name,
                "dtype": str(value.dtype).removeprefix("torch."),
                "shape": layout.shape(path, value),
            }
            for name, path, value in named
            if isinstance(value, torch.Tensor) and value.ndim and name != "labels"
        ]

    def __call__(
        self, module: Callable[..., Any], batch: Any, samples: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run ``module`` on a prepared batch; the sum of the losses and what it is a sum over, as scalars.

        :param samples: how many of the batch count; with 0 it is a stand-in, whose loss is a 0
            that gives zeros to the parameters that get gradients from the job's loss.
        :raises JobError: when there is no loss, or it is not a scalar.
        :raises DoesNotFit: when the loss is made otherwise than :attr:`rule` has it.
        """
        group = dist.group.WORLD if dist.is_initialized() else None
        loss_means = self.loss_means or LossMeans(
            self.rule, samples, self.batch_samples, self._device, group=group
        )
        means.set_listener(loss_means if loss_means.uses_means else None)
        with precision.autocast(self._precision, self._device):
            outputs = self.run(module, batch)
            loss = self._loss(outputs, batch)
        if not samples:
            loss_means.check_number()
            return self._nothing(outputs, loss)
        with job_log.in_loss():  # on whichever rank has the outputs
            self.seen(outputs, batch, samples)
        tally = loss_means.tally()
        self._tally = tally if self._tally is None else self._tally + tally
        if isinstance(loss, list | tuple) and len(loss) == 2:
            total, over = loss
            self._check_scalar(total)
            self._check_count(over)
            self.counts_samples = False
            return loss_means.as_given(total, over)
        self._check_scalar(loss)
        self.counts_samples = self.counts_samples is not False and self.rule.kind != "labels"
        return loss_means.summed(loss)

    def warn_of_small_count(self, count: float, samples: int, warn: Callable[[str], object]) -> None:
        """Warn where the second part of a pair may be a metric: of one, nothing else tells it from a count.

        Sums of the weights of samples may be as small, and may follow from the outputs, too.

        :param count: what the loss was a sum over, in all of a batch of ``samples`` samples.
        """
        if self.rule.kind == "samples" and count <= 1 < samples:
            warn(
                f"{self._name} returned a pair whose second part is {count:g} for a batch of {samples} "
                "samples, and the job trains on the first divided by it, as of (sum, count). If it is an "
                "accuracy or another metric, return the loss alone, and name the metric in Job(metrics=...)"
            )

    def _loss(self, outputs: Any, batch: Any) -> Any:
        if self._loss_function is None:
            return as_scalar(_own_loss(outputs))
        with job_log.in_loss(), without_group():
            return call_loss(self._loss_function, self._name, outputs, batch)

    def _nothing(self, outputs: Any, loss: Any) -> tuple[torch.Tensor, torch.Tensor]:
        zero = torch.zeros((), dtype=torch.float64, device=self._device)
        total = loss[0] if isinstance(loss, list | tuple) else loss
        if not total.requires_grad:
            return zero, zero
        # Zeros begin at the outputs, for what comes after may be infinite; a model's own loss is an output.
        ends = [total] if self._loss_function is None else _behind(total, outputs)
        return _Nothing.apply(*ends), zero  # type: ignore[no-untyped-call]

    def run(self, module: Callable[..., Any], batch: Any) -> Any:
        """Run ``module`` on a prepared batch; its outputs."""
        with precision.autocast(self._precision, self._device):
            return self.call(module, batch)

    def call(self, module: Callable[..., Any], batch: Any) -> Any:
        """Call ``module`` with what is its of a prepared batch, in the precision that is set; its outputs.

        :raises JobError: when it does not take that.
        """
        args, kwargs = self.inputs(batch)
        try:
            with each_pass_anew():
                return module(*args, **kwargs)
        except TypeError as error:
            if why := self._why_not_taken(args, kwargs):
                raise JobError(why) from error
            raise

    def _why_not_taken(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Why the model does not take these arguments; None where it does, as far as its source tells."""
        try:
            inspect.signature(self._model_class.forward).bind(None, *args, **kwargs)
            return None
        except ValueError:
            return None
        except TypeError as error:
            gets = f"{self._model_class.__name__}.forward gets"
            if not kwargs:
                return f"{gets} the first part of a batch, which is a pair, and nothing else: {error}"
            kept = ", labels are kept for the loss function" if self._loss_function is not None else ""
            return (
                f"{gets} what a batch holds as keyword arguments ({', '.join(kwargs)}{kept}): {error}. "
                "Let it take these names, with **others for what only the loss needs; or make batches pairs "
                "(inputs, targets), of which it gets the first part as it is"
            )

    def _check_scalar(self, loss: Any) -> None:
        if not isinstance(loss, torch.Tensor):
            raise JobError(
                f"{self._name} returned {type(loss).__name__} as its loss; "
                "return the mean over the samples as a scalar tensor, or a pair (sum, count)"
            )
        if loss.ndim:
            raise JobError(
                f"{self._name} returned a loss of shape {tuple(loss.shape)}, which is no scalar; "
                "return the mean over the samples, or a pair (sum, count)"
            )
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise JobError(
                f"{self._name} returned a loss that no trainable parameter takes part in; "
                "compute it from the model's outputs, without detach(), item() or no_grad()"
            )

    def _check_count(self, over: Any) -> None:
        is_tensor = isinstance(over, torch.Tensor)
        if not (over.numel() == 1 if is_tensor else isinstance(over, Number)):
            what = f"Tensor of shape {tuple(over.shape)}" if is_tensor else type(over).__name__
            raise JobError(
                f"{self._name} returned a pair whose second part is a {what}; of a pair (sum, count) it is "
                "the number that the first is a sum over. Return the mean over the samples alone, and name "
                "what else is to be measured in Job(metrics=...)"
            )
        if is_tensor and over.requires_grad:
            raise JobError(
                f"{self._name} returned a pair (sum, count) whose count follows from trainable parameters, "
                "as a second loss or a sum of learned weights does, and would get no gradient; return one "
                "scalar, the whole loss"
            )


def loss_function_of(job: Job) -> Callable[[Any, Any], Any] | None:
    """A job's loss function; None where the model computes its loss.

    :raises JobError: where it is a class of losses: called with outputs and targets it makes no loss.
    """
    if not job.loss_function:
        return None
    found: Callable[[Any, Any], Any] = references.load(str(job.loss_function))
    if isinstance(found, type) and issubclass(found, nn.Module):
        raise JobError(
            f"loss_function {job.loss_function!r} is a class; name a function such as "
            "'torch.nn.functional:mse_loss', or make an object of the class at the top level of a module, "
            f"loss = {found.__name__}(), and name that"
        )
    return found


def call_loss(function: Callable[[Any, Any], Any], name: str, outputs: Any, batch: Any) -> Any:
    """The loss of ``batch``, as :func:`as_scalar` has it.

    :param function: called with ``outputs`` and the second part of a pair, or the whole of another batch.
    :param name: how messages name it.
    :raises JobError: from whatever it raises.
    """
    is_pair = isinstance(batch, list | tuple)
    with of_the_job(name):
        try:
            return as_scalar(function(outputs, batch[1] if is_pair else batch))
        except TypeError as error:
            if why := _why_not_called(function):
                gets = "targets" if is_pair else "batch"
                raise JobError(f"{name} is called with the model's outputs and the {gets}: {why}") from error
            raise


def _why_not_called(function: Callable[[Any, Any], Any]) -> str | None:
    """Why ``function`` takes no two arguments; None where it does, or its source does not tell."""
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        return str(error)
    except ValueError:
        pass
    return None


def as_scalar(loss: Any) -> Any:
    """A loss of one number without its dimensions, which a backward pass can do without, too."""
    return loss.reshape(()) if isinstance(loss, torch.Tensor) and loss.ndim and loss.numel() == 1 else loss


def _own_loss(outputs: Any) -> Any:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if loss is None:
        raise JobError(
            f"the model returned no loss (but a {type(outputs).__name__}); give the job a loss_function, "
            "or batches with what the model computes its loss from, such as labels"
        )
    return loss


class _Nothing(torch.autograd.Function):
    """A zero in the place of tensors: they get zeros as gradients, whatever their values."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.like = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        return torch.zeros((), dtype=tensors[0].dtype, device=tensors[0].device)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.zeros(s, dtype=dtype, device=device) for s, dtype, device in ctx.like)


def _behind(loss: torch.Tensor, outputs: Any) -> list[torch.Tensor]:
    """The outputs that a loss is computed from, or the loss itself where it depends on anything else."""
    data = vars(outputs) if hasattr(outputs, "__dict__") and not isinstance(outputs, Mapping) else outputs
    found = tensors_in(outputs if isinstance(outputs, torch.Tensor) else data)
    nodes: dict[Any, torch.Tensor] = {t.grad_fn: t for t in found if t.grad_fn is not None}
    used: list[torch.Tensor] = []
    seen = {loss.grad_fn}
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node in nodes:
            used.append(nodes[node])
        elif hasattr(node, "variable"):
            # Where autograd adds up a leaf's gradient: a parameter is reached around the outputs.
            return [loss]
        else:
            following = {function for function, _ in node.next_functions if function is not None} - seen
            seen |= following
            waiting.extend(following)
    return used


def _parameters_beside(model: nn.Module, loss_function: Any) -> list[str]:
    if not isinstance(loss_function, nn.Module):
        return []
    of_the_model = {id(parameter) for parameter in parameters_of(model)}
    own = loss_function.named_parameters()
    return [name for name, value in own if value.requires_grad and id(value) not in of_the_model]
