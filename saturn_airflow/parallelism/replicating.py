"""Every rank holds the whole model and averages its gradients with the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from saturn_airflow.launch.request import DoesNotFit
from saturn_airflow.parallelism.parallel import Parallel, forget_missing
from saturn_airflow.training.without_group import without_group


class Replicated(Parallel):
    """A model in torch's DDP.

    DDP waits for the gradient of every parameter. Here each takes part in the loss in such a way that DDP
    hears of those without a gradient as well, which costs less than ``find_unused_parameters``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._have_gradient: set[str] = set()
        # What DDP waits for, frozen by now or not.
        self._awaited = list(self.trainable().values())

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs of the model, which sees no other rank: it might be that which has no samples."""
        ddp = self.module
        # DDP, which hands buffers around, fails where the model has deleted the last of them since.
        assert isinstance(ddp, DistributedDataParallel)
        if ddp.modules_buffers and next(ddp.module.buffers(), None) is None:
            ddp.modules_buffers = []
        with without_group():
            return super().call(*args, **kwargs)

    def missing_gradients(self) -> int:
        """Those of this rank alone, before DDP put in the others': of a rank without samples, from earlier
        micro-batches."""
        return len(self.trainable()) - len(self._have_gradient)

    def finish_gradients(self) -> None:
        """Remove the zeros that DDP put where no rank computed a gradient."""
        if self.gradients_missing:
            forget_missing(self.trainable(), self._have_gradient, self.ranks)

    def run_backward(self, loss: torch.Tensor, samples: int, last: bool) -> None:
        """Run the backward pass, and note which gradients are this rank's own before DDP averages them.

        :raises DoesNotFit: for reentrant checkpoints and for sparse gradients, which DDP can't exchange.
        """
        trainable = self.trainable()
        before = self._with_gradient()

        def note() -> None:
            # Called when the backward pass is over, but before DDP has put in gradients of the others.
            self._have_gradient = self._with_gradient() if samples else before

        # DDP's hook on a parameter is called once the parameter's place in the graph was reached, also where
        # no gradient arrived there. So a zero that all take part in is added to the loss.
        frozen = [p for p in self._awaited if not p.requires_grad]
        with _asking_for_gradients(frozen):
            zero = _ZeroOfAll.apply(note, loss.detach(), *trainable.values(), *frozen)  # type: ignore[no-untyped-call]
        with _translated_errors():
            (loss + zero).backward()
        for parameter in frozen:  # DDP has put in zeros
            parameter.grad = None
        # The gradients of a sample that stands in are zeros that must not look like gradients of a later one.
        if not samples and not last:
            for name, parameter in trainable.items():
                if name not in before:
                    parameter.grad = None

    def _with_gradient(self) -> set[str]:
        return {name for name, p in self.trainable().items() if p.grad is not None}

    def _gradient_sync(self, last: bool) -> AbstractContextManager[Any]:
        assert isinstance(self.module, DistributedDataParallel)
        return nullcontext() if last else self.module.no_sync()


@contextmanager
def _asking_for_gradients(frozen: Sequence[nn.Parameter]) -> Iterator[None]:
    """Parameters that are frozen take part inside in what is computed."""
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


@contextmanager
def _translated_errors() -> Iterator[None]:
    """DDP exchanges each gradient once, and sparse ones of embeddings that nothing else uses, if it can."""
    try:
        yield
    except RuntimeError as error:
        if "mark a variable ready only once" in str(error):
            raise DoesNotFit(
                "a part of the backward pass is run within the backward pass, as reentrant checkpoints do, "
                "and DDP exchanges a parameter's gradient once; say use_reentrant=False, or use another "
                "technique"
            ) from error
        if "sparse" not in str(error).lower():
            raise
        raise DoesNotFit(
            "a parameter gets sparse gradients, which DDP can't exchange here "
            f"({str(error).splitlines()[0]:.150}); use sparse=False, or another technique"
        ) from error


class _ZeroOfAll(torch.autograd.Function):
    """A zero that parameters take part in, without getting a gradient from it."""

    @staticmethod
    def forward(
        ctx: Any, at_the_end: Callable[[], None], like: torch.Tensor, *parameters: torch.Tensor
    ) -> torch.Tensor:
        ctx.at_the_end, ctx.count = at_the_end, len(parameters)
        return torch.zeros_like(like)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, ...]:
        # The way FSDP and DDP themselves hear of the end of a backward pass.
        torch.autograd.Variable._execution_engine.queue_callback(ctx.at_the_end)
        return (None, None, *(None for _ in range(ctx.count)))
