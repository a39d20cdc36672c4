"""The optimizer's steps on blocks in the host's memory, while others are computed.

Where nothing is clipped, a block is stepped on in the backward pass, while those below it are computed. As
the loop's own step it is taken on the gradients of the batch's mean, and not where the loss is no number.
Both follow from sums over all micro-batches, which are there once the last forward pass is: they are copied
to the host, and awaited where the steps are taken.

What is clipped by the norm of all gradients is stepped on in the next forward pass: each block before it is
sent to the device, while those before it are computed. Whatever else looks at weights then would find old and
new ones, so what the model does is watched in its first passes. What is compiled is not: torch compiles
nothing that it first met while it was watched. There all that is clipped is stepped on at once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from saturn_airflow.parallelism.block_stream import Prepare, StepOn
from saturn_airflow.parallelism.blocks import how_compiled
from saturn_airflow.parallelism.parallel import multiply
from saturn_airflow.parallelism.transfers import Transfers
from saturn_airflow.parallelism.uncompiled import UncompiledDispatchMode
from saturn_airflow.training.optim.in_parts import InParts

# Forward passes that are watched: in the first, models may still set themselves up.
_WATCHED = 2


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
        self._watches = not any(map(how_compiled, model.modules()))
        self._watched = 0
        self._read_otherwise = False

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Begin with a batch, on which ``optimizer`` will step."""
        wanted = self._possible(optimizer) and not any(map(_has_backward_hooks, self._model.modules()))
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
        in_host = self._transfers.buffer(self._sums.nbytes).view(torch.float64)
        ticket = self._transfers.to_host([self._sums], [in_host])
        return functools.partial(self._step_on, self._parts, in_host, ticket, batch_samples)

    def watching(self, weights: Sequence[nn.Parameter]) -> AbstractContextManager[Any]:
        """Around a forward pass: whether anything but the streams uses ``weights``."""
        watches = self._watches and self._watched < _WATCHED
        if not watches or not self._transfers.staged or not torch.is_grad_enabled():
            return nullcontext()
        self._watched += 1
        return _Reads(weights, self._found_read)

    def _found_read(self) -> None:
        self._read_otherwise = True

    def of_clipped(self, optimizer: torch.optim.Optimizer, factor: torch.Tensor) -> Prepare | None:
        """What prepares the step on a block for the next forward pass; None where it can't be taken then.

        :param factor: what gradients are to be multiplied by before it, on the device.
        """
        hooked = any(m._forward_hooks or m._forward_pre_hooks for m in self._model.modules())
        if hooked or self._read_otherwise or self._watched < _WATCHED or not self._possible(optimizer):
            return None
        assert self._parts is not None
        in_host = self._transfers.buffer(factor.nbytes).view(torch.float64)
        ticket = self._transfers.to_host([factor.reshape(1)], [in_host])
        return functools.partial(self._prepare, self._parts, in_host, ticket)

    def _prepare(
        self, parts: InParts, factor: torch.Tensor, ticket: Any, parameters: Sequence[nn.Parameter]
    ) -> Callable[[], None]:
        step = parts.prepared(parameters)

        @torch.no_grad()
        def take() -> None:
            self._transfers.wait(ticket)
            multiply([p.grad for p in parameters if p.grad is not None], factor[0])
            step()

        return take

    def _possible(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether ``optimizer`` can step on some parameters in another thread."""
        if self._parts is None or self._parts.optimizer is not optimizer:
            self._parts = InParts(optimizer)
        # Where the device's memory is the host's, nothing could be beside anything.
        return self._transfers.staged and bool(self._parts)

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


class _Reads(UncompiledDispatchMode):  # type: ignore[no-untyped-call]
    """Hears of operations on ``weights`` themselves, in this thread."""

    def __init__(self, weights: Sequence[nn.Parameter], found: Callable[[], None]) -> None:
        super().__init__()
        self._found = found
        self._storages = {_storage(weight) for weight in weights}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(p, torch.Tensor) and _storage(p) in self._storages for p in _leaves(args, kwargs)):
            self._found()
        return func(*args, **kwargs)


def _leaves(*values: Any) -> list[Any]:
    return _pytree.tree_leaves(values)


def _storage(tensor: torch.Tensor) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse ones have none of their own
        return None
