"""The plain loop that techniques are compared with: one device, the whole batch, and nothing of Saturn's.

No technique, no compilation, no cutting into shares or micro-batches: the model is called on the whole global
batch, its loss goes backward, gradients are clipped, the optimizer steps.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from saturn_airflow.launch.users_code import of_the_job
from saturn_airflow.model.jobs import Job
from saturn_airflow.parallelism.module_state import parameters_of
from saturn_airflow.parallelism.parallel import Parallel
from saturn_airflow.training import precision
from saturn_airflow.training.guarding.counting import counts_of, grown
from saturn_airflow.training.guarding.samples import Samples, Singles, buffers_of, samples, singles
from saturn_airflow.training.layout import MicroBatch
from saturn_airflow.training.losses import means
from saturn_airflow.training.losses.objective import Objective, as_scalar, call_loss, loss_function_of
from saturn_airflow.training.losses.rules import SAMPLES, Rule
from saturn_airflow.training.optim import optimizers
from saturn_airflow.training.optim.update_formats import noting_update_formats
from saturn_airflow.training.ranks import Ranks


@dataclass(frozen=True)
class Step:
    """What one optimizer step showed and left.

    :param loss: the mean over the global batch.
    :param counted: what the loss is a mean over, where it says so.
    :param gradients: as the optimizer saw them, by the parameter's first name; None for one that is missing.
    :param before: elements of the parameters before the step, and
    :param weights: after it.
    :param buffers: after the step.
    :param stateful: names of parameters that the optimizer keeps something of.
    :param counts: by how much numbers have grown since the first step, see :mod:`counting`.
    :param update_format: the lowest number format that the optimizer computed in.
    :param clip: the norm that gradients were clipped to, or would have been; None where none are.
    :param unclipped: the gradients before that, where somebody has looked at them.
    """

    loss: float
    counted: float | None
    gradients: Samples
    before: Singles
    weights: Singles
    buffers: Samples
    stateful: frozenset[str]
    counts: Mapping[str, float] = field(default_factory=dict)
    update_format: torch.dtype = torch.float64
    clip: float | None = None
    unclipped: Samples = field(default_factory=dict)


class PlainLoop:
    """A plain loop over ``model``, which it changes, on its device.

    :param rule: how micro-batches make up a batch, where the job's result is that of micro-batches.
    """

    def __init__(self, job: Job, model: nn.Module, device: torch.device, rule: Rule = SAMPLES) -> None:
        self.model = model
        self._job = job
        self._device = device
        self._alone = Parallel(model, Ranks(rank=0, size=1, device=device), optimizer_kernels="many at once")
        self._objective = Objective(job, model, device, rule)
        self._loss_function = loss_function_of(job)
        self._last: Singles = {}
        self._frozen = optimizers.frozen(model)
        self._names = {p: name for name, p in model.named_parameters()}
        #: Called before each step of the optimizer.
        self.before_step: Callable[[], None] = lambda: None
        #: What share of their norm gradients that are clipped are clipped to, once they are noted; None for
        #: what the job says.
        self.clipped_share: float | None = None
        self._clipped_to: float | None = None
        self._unclipped: Samples = {}
        self._counted_before: Mapping[str, float] | None = None
        model.train()

    def loss(self, batch: Any) -> tuple[torch.Tensor, float | None]:
        """The mean loss of a whole batch, and what it is a mean over, where it says so."""
        batch = precision.place(batch, self._device, self._job.hparams.precision)
        means.set_listener(None)  # nobody looks into this loss
        with of_the_job("the model"), precision.autocast(self._job.hparams.precision, self._device):
            outputs = self._objective.call(self.model, batch)
            if self._loss_function is None:
                loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
                loss = as_scalar(loss)
            else:
                name = f"loss_function {self._job.loss_function!r}"
                loss = call_loss(self._loss_function, name, outputs, batch)
            mean, counted = loss, None
            if isinstance(loss, list | tuple) and len(loss) == 2:
                mean, counted = loss[0] / loss[1], float(loss[1])
            untrained = torch.is_grad_enabled() and isinstance(mean, torch.Tensor) and not mean.requires_grad
            if not isinstance(mean, torch.Tensor) or mean.ndim or untrained:
                self._objective(self.model, batch, 1)  # it knows what to say of such a loss
                assert isinstance(mean, torch.Tensor)
        return mean, counted

    def loss_of(self, model: nn.Module, batch: Any) -> float:
        """The mean loss of a whole batch, computed by another model of the job, in training mode."""
        own, self.model = self.model, model.train()
        try:
            loss, _ = self.loss(batch)
        finally:
            self.model = own
        return float(loss.detach())

    def evaluate(self, batch: Any) -> float:
        """The mean loss of a whole batch where nothing is trained."""
        self.model.eval()
        with torch.no_grad():
            loss, _ = self.loss(batch)
        self.model.train()
        return float(loss)

    @functools.cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        """The job's, over all parameters."""
        groups = optimizers.parameter_groups(self._job.hparams, self.model)
        return optimizers.make_optimizer(self._job.hparams, groups, self._alone)

    def gradients(self, parts: Sequence[MicroBatch]) -> tuple[float, float | None, Samples]:
        """The mean loss of a batch, what it is a mean over, and the gradients that are then there.

        :param parts: the whole batch, or its micro-batches.
        """
        counted: float | None
        if len(parts) > 1:
            mean, counted = self._accumulate(parts)
        else:
            loss, counted = self.loss(parts[0].data)
            loss.backward()  # type: ignore[no-untyped-call]
            mean = float(loss.detach())
        # A forward pass may freeze some, and have others trained again.
        optimizers.refuse_thawed(self._frozen)
        parameters = [p for p in parameters_of(self.model) if p.requires_grad]
        if self._job.hparams.clip_grad_norm is not None:
            noting = self.clipped_share is not None
            self._unclipped = samples({self._names[p]: p.grad for p in parameters if noting})
            self._clipped_to = _clip(parameters, self._job.hparams.clip_grad_norm, self.clipped_share)
        gradients = samples({self._names[p]: p.grad for p in parameters})
        return mean, counted, gradients

    def unclipped(self, batch: Any, scale: float) -> tuple[float, list[Samples]]:
        """The mean loss of a whole batch, and what gradients of ``scale`` times as much are, over that; they
        are forgotten then."""
        self.model.zero_grad(set_to_none=True)
        loss, _ = self.loss(batch)
        (loss * scale).backward()  # type: ignore[no-untyped-call]
        parameters = [p for p in parameters_of(self.model) if p.requires_grad]
        found = samples({self._names[p]: None if p.grad is None else p.grad / scale for p in parameters})
        self.model.zero_grad(set_to_none=True)
        return float(loss.detach()), [found]

    def _accumulate(self, parts: Sequence[MicroBatch]) -> tuple[float, float]:
        """Add up the gradients of the parts of a batch; their mean loss, and what it is a mean over."""
        all_samples = sum(part.samples for part in parts)
        self._objective.begin(all_samples)
        losses, over = 0.0, 0.0
        for part in parts:
            data, samples = self._objective.prepare(part.data, part.samples)
            loss, of = self._objective(self.model, data, samples)
            (loss / all_samples).backward()  # type: ignore[no-untyped-call]
            losses, over = losses + float(loss.detach()), over + float(of)
        # They are over the samples by now, and are to be over what the loss counts, such as tokens.
        for gradient in (p.grad for p in parameters_of(self.model) if p.grad is not None):
            gradient *= all_samples / over
        return losses / over, over

    def step(self, parts: Sequence[MicroBatch]) -> Step:
        """Train on one batch, see :meth:`gradients`."""
        before = self._last or self.weights()
        optimizer = self.optimizer
        if self._counted_before is None:
            self._counted_before = counts_of(self._job, self.model)
        counted_before = self._counted_before
        loss, counted, gradients = self.gradients(parts)
        if not math.isfinite(loss):
            return Step(loss, counted, gradients, before, before, {}, frozenset())
        with (
            of_the_job(f"optimizer {self._job.hparams.optimizer!r}"),
            noting_update_formats([optimizer]) as noted,
        ):
            self.before_step()
            optimizer.step()
        self.model.zero_grad(set_to_none=True)
        stateful = stateful_of([optimizer], self._names)
        self._last = self.weights()
        counts = grown(counted_before, counts_of(self._job, self.model))
        buffers = buffers_of(self.model)
        kept = stateful, counts, noted.lowest, self._clipped_to, self._unclipped
        return Step(loss, counted, gradients, before, self._last, buffers, *kept)

    def weights(self) -> Singles:
        """Elements of the parameters."""
        return singles({name: p for p, name in self._names.items()})


def _clip(parameters: Sequence[nn.Parameter], most: float, share: float | None = None) -> float:
    """What torch's ``clip_grad_norm_`` does, also where some gradients are sparse, which it refuses.

    :param share: clip to this share of the norm there is, if it is a number, rather than to ``most``.
    :returns: the norm that was clipped to.
    """
    sparse = [p for p in parameters if p.grad is not None and p.grad.is_sparse]
    for parameter in sparse:
        assert parameter.grad is not None
        parameter.grad = parameter.grad.coalesce()
    gradients = [p.grad for p in parameters if p.grad is not None]
    values = [gradient.values() if gradient.is_sparse else gradient for gradient in gradients]
    norm = nn.utils.get_total_norm(values)
    if share is not None and 0 < float(norm) < math.inf:
        most = share * float(norm)
    if not sparse:
        nn.utils.clip_grads_with_norm_(parameters, most, norm)
        return most
    for gradient in gradients:
        gradient.mul_((most / (norm + 1e-6)).clamp(max=1.0))
    return most


def stateful_of(optimizers: Sequence[torch.optim.Optimizer], names: Mapping[Any, str]) -> frozenset[str]:
    """Names of parameters that ``optimizers`` keep something of."""
    states = itertools.chain.from_iterable(optimizer.state.items() for optimizer in optimizers)
    # What is kept of no parameter in particular has a name, and may be a number.
    kept = (names[p] for p, state in states if p in names and any(v is not None for v in state.values()))
    return frozenset(kept)
