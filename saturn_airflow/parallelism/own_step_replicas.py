"""Every rank holds the whole model and takes the training step that a job's model has of its own.

Such a step may run any number of backward passes, and clip and step in between, so gradients are averaged at
the end of each backward pass, not where a wrapped forward pass ended.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from saturn_airflow.launch.request import ChangesResultError, DoesNotFit
from saturn_airflow.parallelism.module_state import parameters_of
from saturn_airflow.parallelism.parallel import Parallel
from saturn_airflow.training import whole_batch
from saturn_airflow.training.ranks import Ranks

# Numbers that ranks tell each other at the end of a step.
_MOST_TOLD = 3


class OwnStepReplicas(Parallel):
    """A model on this rank whose gradients become those of the whole batch when a backward pass ends.

    Each rank computes the mean loss over its share. What counts of it is the share's part of the batch's
    samples, so that the sum over the ranks is the mean over the batch. A gradient that there was before a
    backward pass is the same on all ranks, and what counts adds up to 1: it stays what it was.
    """

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        super().__init__(model, ranks, share=ranks.rank, shares=ranks.size)
        #: Whether this rank computes without the others.
        self.alone = False
        self._weight = 1.0
        self._touched: set[nn.Parameter] = set()
        self._exchanged = [p for p in parameters_of(model) if p.is_floating_point() or p.is_complex()]
        for parameter in self._exchanged:
            # One that is frozen for now may be trained later.
            trained = parameter.requires_grad
            parameter.requires_grad_(True)
            parameter.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]
            parameter.requires_grad_(trained)
        # What ranks tell at the ends of backward passes and of steps has one size: others would end gloo's
        # process where ranks are at different ends.
        self._told = 1 + max(len(self._exchanged), _MOST_TOLD)

    def begin(self, samples: int, of: int, turned: bool) -> None:
        """Begin with a batch of which this rank has ``samples``; with none, what it computes stands in."""
        self._weight = samples / of
        self._touched.clear()
        self._tell_norms(samples)
        if self._whole_batch is not None:
            self._whole_batch.weight = self._weight
        whole_batch.begin(self.ranks, samples, turned)

    def end(self) -> None:
        """End with a batch."""
        whole_batch.end()

    def part(self, value: torch.Tensor) -> torch.Tensor:
        """What this rank adds to a mean over the batch of a ``value`` that is the mean over its share."""
        value = value.detach().to(self.ranks.device, torch.float64)
        return value * self._weight if self._weight else torch.zeros_like(value)

    def sum_of(self, values: torch.Tensor, *, of_step: bool) -> torch.Tensor:
        """The sum over the ranks of ``values``, at the end of a step or else of a backward pass.

        :param values: at the end of a step not more than three.
        :raises ChangesResultError: where it is the end of a step on some ranks only.
        """
        if self._whole_batch is not None:
            self._whole_batch.finish_pass()
        told = torch.zeros(self._told, dtype=torch.float64, device=self.ranks.device)
        told[0] = float(of_step)
        told[1 : 1 + len(values)] = values
        dist.all_reduce(told, group=dist.group.WORLD)
        if int(told[0]) not in (0, self.ranks.size):
            raise ChangesResultError(
                "training_step runs more backward passes on one device than on another, as where it leaves "
                "one out by what it finds in its samples, of which each device has some: decide by all of "
                "them (saturn_airflow.training.whole_batch has them), or leave the technique out of "
                "Job(techniques=...)"
            )
        return told[1 : 1 + len(values)]

    def _note(self, parameter: torch.Tensor) -> None:
        if self.alone:
            return
        if not self._touched:
            # The way FSDP and DDP themselves hear of the end of a backward pass.
            torch.autograd.Variable._execution_engine.queue_callback(self._average)
        assert isinstance(parameter, nn.Parameter)
        self._touched.add(parameter)

    def _average(self) -> None:
        touched, self._touched = self._touched, set()
        flags = torch.tensor([float(p in touched) for p in self._exchanged], dtype=torch.float64)
        flags = self.sum_of(flags, of_step=False)
        exchanged = [p for p, flag in zip(self._exchanged, flags.tolist(), strict=True) if flag]
        by_format: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in exchanged:
            by_format.setdefault(parameter.dtype, []).append(parameter)
        with torch.no_grad():
            for parameters in by_format.values():
                self._average_of(parameters)

    def _average_of(self, parameters: list[nn.Parameter]) -> None:
        own = [self._gradient(p) for p in parameters]
        flat = torch.cat([gradient.reshape(-1) for gradient in own])
        # What stands in may be infinite or no number.
        flat = flat.mul_(self._weight) if self._weight else torch.zeros_like(flat)
        dist.all_reduce(flat, group=dist.group.WORLD)
        parts = torch.split(flat, [p.numel() for p in parameters])
        for parameter, averaged in zip(parameters, parts, strict=True):
            averaged = averaged.view(parameter.shape)
            if parameter.grad is None:
                parameter.grad = averaged.clone()
            else:
                parameter.grad.copy_(averaged)

    def _gradient(self, parameter: nn.Parameter) -> torch.Tensor:
        gradient = parameter.grad
        if gradient is None:
            return torch.zeros_like(parameter)
        if gradient.is_sparse:
            raise DoesNotFit(
                "a parameter gets sparse gradients, which ddp can't average for a training step of the job's "
                "own; use sparse=False, or one device"
            )
        return gradient
