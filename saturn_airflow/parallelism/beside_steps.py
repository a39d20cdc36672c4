"""The optimizer's steps on blocks in the host's memory, while others are still computed backwards.

As the loop's own step it is taken on the gradients of the batch's mean, and not where the loss is no number.
Both follow from sums over all micro-batches, which are there once the last forward pass is: they are copied
to the host, and awaited where the steps are taken.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from saturn_airflow.parallelism.block_stream import StepOn
from saturn_airflow.parallelism.transfers import Transfers
from saturn_airflow.training.optim.in_parts import InParts


class BesideSteps:
    """The steps on the blocks of ``model``, one batch after the other.

    :param device: where losses are.
    """

    def __init__(self, model: nn.Module, device: torch.device, transfers: Transfers) -> None:
        self._model = model
        self._device = device
        self._transfers = transfers
        self._parts: InParts | None = None
        self._sums: torch.Tensor | None = None

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Begin with a batch, on which ``optimizer`` will step."""
        if self._parts is None or self._parts.optimizer is not optimizer:
            self._parts = InParts(optimizer)
        # Where the device's memory is the host's, nothing could be beside anything.
        possible = self._transfers.staged and bool(self._parts)
        wanted = possible and not any(map(_has_backward_hooks, self._model.modules()))
        self._sums = torch.zeros(2, dtype=torch.float64, device=self._device) if wanted else None

    def of_micro_batch(
        self, parts: tuple[torch.Tensor, torch.Tensor], batch_samples: int, *, last: bool
    ) -> StepOn | None:
        """What takes the step on a block in the backward pass of the ``last`` micro-batch; None in others.

        :param parts: the summed loss of the micro-batch, and what it is a sum over.
        :param batch_samples: what gradients were divided by.
        """
        if self._sums is None or self._parts is None:
            return None
        self._sums += torch.stack(parts)
        if not last:
            return None
        at_home = self._transfers.buffer(self._sums.nbytes).view(torch.float64)
        ticket = self._transfers.to_host([self._sums], [at_home])
        return functools.partial(self._step_on, self._parts, at_home, ticket, batch_samples)

    def end(self) -> None:
        """End with a batch."""
        self._sums = None

    @torch.no_grad()
    def _step_on(
        self,
        parts: InParts,
        sums: torch.Tensor,
        ticket: Any,
        batch_samples: int,
        parameters: Sequence[nn.Parameter],
    ) -> bool:
        self._transfers.wait(ticket)
        total, over = sums.tolist()
        if not over or not math.isfinite(total / over):
            return False  # whether there is a step is for the loop to say
        if over != batch_samples and parameters:
            torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], batch_samples / over)
        parts.step_on(parameters)
        return True


def _has_backward_hooks(module: nn.Module) -> bool:
    """Whether something is called in the backward pass, which may look at weights."""
    return bool(module._backward_hooks or module._backward_pre_hooks)
