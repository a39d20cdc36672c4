"""A model made to train on several devices: what the training loop must know of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from saturn_airflow.launch.users_code import of_the_job
from saturn_airflow.parallelism.batch_norm import whole_batch_of
from saturn_airflow.training.losses.objective import Objective
from saturn_airflow.training.ranks import Ranks

Kernels = Literal["fused", "fused shards", "many at once", "two kinds"]


class Parallel:
    """A model on this rank's device, and how it computes losses and gradients together with the others.

    This class by itself is a model that every rank runs on all of the batch; techniques that work
    otherwise derive their own.

    :param model: holds this rank's parameters and buffers under the names they have in the whole model.
    :param module: what is called with the inputs, if not ``model`` itself.
    :param share: which of the batch's shares this rank computes, and
    :param shares: how many there are; gradients are then means over the shares.
    :param optimizer_kernels: how the optimizer may update the parameters: ``fused`` where all are plain
        tensors, ``fused shards`` where all are shards, ``many at once`` where all are of one kind but no
        kernel for all is wanted, or ``two kinds`` where some are split over devices and others whole.
    """

    #: Whether a trainable parameter is without a gradient on some rank in this step, as the loop found out.
    gradients_missing = False
    #: Whether :meth:`prepare` is to be called.
    wants_example = False
    #: Pieces that every micro-batch of the loop is cut into.
    pieces = 1

    def __init__(
        self,
        model: nn.Module,
        ranks: Ranks,
        module: nn.Module | None = None,
        *,
        share: int = 0,
        shares: int = 1,
        optimizer_kernels: Kernels = "fused",
    ) -> None:
        self.model = model
        self.module = model if module is None else module
        self.ranks = ranks
        self.share = share
        self.shares = shares
        #: Parameters of the technique that :meth:`prepare` decided; with them it decides no more.
        self.decided: dict[str, Any] = {}
        self.optimizer_kernels = optimizer_kernels
        self._whole_batch = whole_batch_of(model)
        self._places: list[tuple[str, dict[str, nn.Parameter | None], str]] | None = None

    def settle(self) -> None:
        """From now on no module comes or goes, and parameters keep their names: looking for them through the
        whole model several times a step would take longer than many a step's computation."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        places: dict[str, tuple[str, dict[str, nn.Parameter | None], str]] = {}
        for module in self.model.modules():
            if isinstance(module, torch.jit.ScriptModule):  # its parameters lie in no dictionary
                continue
            for key, parameter in module._parameters.items():
                if (name := names.get(id(parameter))) is not None:
                    places.setdefault(name, (name, module._parameters, key))
        # A model may name parameters that no module holds.
        if len(places) == len(names):
            self._places = [places[name] for name in names.values()]

    def prepare(self, objective: Objective, batch: Any, samples: int) -> None:
        """Look at a first micro-batch, before the optimizer is made; called if :attr:`wants_example`."""

    def trainable(self) -> dict[str, nn.Parameter]:
        """This rank's trainable parameters by name, each once."""
        named: Iterable[tuple[str, nn.Parameter | None]] = self.model.named_parameters()
        if self._places is not None:
            named = [(name, holder.get(key)) for name, holder, key in self._places]
        return {name: p for name, p in named if p is not None and p.requires_grad}

    def backward(
        self, objective: Objective, batch: Any, samples: int, scale: float, last: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the gradients of ``scale`` times the summed loss of one micro-batch to those there are.

        :param scale: makes the gradients of all micro-batches and shares together those of a mean.
        :param last: whether this is the last micro-batch of the step.
        :returns: this rank's part of the summed loss and of what it is a sum over; added over all ranks
            they are the whole of the micro-batch's.
        """
        prepared, count = objective.prepare(batch, samples)
        self._tell_norms(samples)
        with self._gradient_sync(last):
            with self._blame_the_model():
                total, over = objective(self.call, prepared, count)
            if self._whole_batch is not None:
                self._whole_batch.finish_pass()
            self.run_backward(total * (scale * self.shares), samples, last)
        return self._part(total.detach()), self._part(over)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs of the model, of which losses are computed."""
        return self.module(*args, **kwargs)

    def evaluate(self, objective: Objective, batch: Any, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's part of the summed loss of a micro-batch and of what it is a sum over."""
        prepared, count = objective.prepare(batch, samples)
        self._tell_norms(samples)
        with self._blame_the_model():
            total, over = objective(self.call, prepared, count)
        return self._part(total), self._part(over)

    def finish_evaluating(self) -> None:
        """Clear away what evaluating left behind."""

    def step_beside(self, optimizer: torch.optim.Optimizer) -> None:
        """Hear, before a step's first micro-batch, that ``optimizer`` will take it on the gradients as they
        are: it may be taken on those that are complete before others are. They are None from then on."""

    def step_later(self, optimizer: torch.optim.Optimizer) -> None:
        """Hear, before gradients are clipped, that ``optimizer`` will step on them next: that may be done
        later, until :meth:`complete_steps`. Gradients may be out of sight once they are clipped."""

    def complete_steps(self) -> None:
        """Wait for what is still being done of steps that were taken; until then nobody else may look at
        weights or at the optimizer's state."""

    def missing_gradients(self) -> int:
        """How many trainable parameters got no gradient on this rank, where the ranks' may differ."""
        return 0

    def finish_gradients(self) -> None:
        """Complete the gradients after the last micro-batch."""

    def drop_gradients(self) -> None:
        """Forget all gradients. The optimizer's own ``zero_grad`` would leave those of parameters that are in
        none of its groups, for the next step to clip by."""
        for parameter in self.trainable().values():
            parameter.grad = None

    def scale_gradients(self, factor: torch.Tensor | float) -> None:
        """Multiply all gradients by ``factor``, a number or a scalar on this rank's device."""
        multiply(self._gradients(), torch.as_tensor(factor, dtype=torch.float64))

    def clip_gradients(self, max_norm: float) -> None:
        """Scale the gradients of the whole model down to an L2 norm of ``max_norm``."""
        gradients = self._gradients()
        multiply(gradients, self._clipping(gradients, max_norm))

    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.trainable().values() if p.grad is not None]

    def _clipping(self, gradients: list[torch.Tensor], max_norm: float) -> torch.Tensor:
        """What ``gradients``, all of this rank, are to be multiplied by, as a scalar on its device."""
        total = self._squared_norm(gradients).sqrt()
        # As torch.nn.utils.clip_grad_norm_ has it.
        return (max_norm / (total + 1e-6)).clamp(max=1.0)

    def _squared_norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """The squared L2 norm of the whole model's gradient, of which this rank holds ``gradients``."""
        split = [gradient for gradient in gradients if _is_split(gradient)]
        whole = [gradient for gradient in gradients if not _is_split(gradient)]
        squared = self._local_squared_norm(split)
        if self.ranks.size > 1 and split:
            dist.all_reduce(squared)
        return squared + self._local_squared_norm(whole)

    def _local_squared_norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        squared = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        for group in _by_device(gradients).values():
            squared += get_total_norm(list(map(_values, group)), foreach=True).to(squared) ** 2
        return squared

    def _tell_norms(self, samples: int) -> None:
        """Tell BatchNorms whether this rank's samples count, or one only stands in for an empty share."""
        if self._whole_batch is not None:
            self._whole_batch.counts = samples > 0

    def run_backward(self, loss: torch.Tensor, samples: int, last: bool) -> None:
        """Run the backward pass; with no ``samples`` the loss is a 0 that is there for the other ranks."""
        loss.backward()  # type: ignore[no-untyped-call]

    def _gradient_sync(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def _blame_the_model(self) -> AbstractContextManager[Any]:
        """On one device the model runs as the user wrote it; on several an error may come from the others."""
        return of_the_job("the model") if self.ranks.size == 1 else nullcontext()

    def _part(self, value: torch.Tensor) -> torch.Tensor:
        """What this rank adds to a sum over all ranks of a value that ``size / shares`` ranks each have."""
        value = value.to(torch.float64)
        return value if self.shares == self.ranks.size else value * (self.shares / self.ranks.size)


def multiply(gradients: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply gradients, wherever they are, by a scalar in float64."""
    for device, group in _by_device(gradients).items():
        for dtype in {gradient.dtype for gradient in group}:
            alike = [gradient for gradient in group if gradient.dtype == dtype]
            if dtype.itemsize >= 4:  # a factor of another dtype is multiplied with one after another
                torch._foreach_mul_(alike, factor.to(device, dtype.to_real()))
                continue
            for gradient in alike:  # a GPU would round the factor to the gradients' dtype
                gradient.copy_(gradient.float().mul_(factor.to(device, torch.float32)))


def _is_split(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor) and any(placement.is_shard() for placement in tensor.placements)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _values(gradient: torch.Tensor) -> torch.Tensor:
    """The numbers of a gradient that are not 0 for want of an entry: torch has no norm of sparse tensors."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _by_device(tensors: Sequence[torch.Tensor]) -> dict[torch.device, list[torch.Tensor]]:
    groups: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in map(_local, tensors):
        groups.setdefault(tensor.device, []).append(tensor)
    return groups


def forget_missing(parameters: Mapping[str, nn.Parameter], here: Set[str], ranks: Ranks) -> None:
    """Remove the gradients of those ``parameters`` that no rank computed; every rank calls this together.

    A missing gradient is a zero in the sum over the ranks, as where each trains other experts of a mixture.
    One that is missing on every rank stays missing, so that the optimizer leaves its parameter alone, as it
    does on one device.

    :param here: the names of those whose gradients this rank computed.
    """
    found = ranks.sums([float(name in here) for name in parameters])
    for parameter, count in zip(parameters.values(), found, strict=True):
        if not count:
            parameter.grad = None
