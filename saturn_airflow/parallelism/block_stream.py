"""A device's copies of blocks' weights, fetched one block ahead, and the way of gradients to the host.

The optimizer may step on a block there while the blocks below it are still computed backwards.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from saturn_airflow.launch.request import DoesNotFit
from saturn_airflow.parallelism.transfers import Buffers, HostTask, Tensors, Transfers, laid_out, views

Weights = tuple[torch.Tensor, ...]
#: Takes the optimizer's step on parameters whose gradients are complete; whether it did.
StepOn = Callable[[Sequence[nn.Parameter]], bool]
#: What takes the optimizer's step, as it is now, on parameters and their gradients of then.
Prepare = Callable[[Sequence[nn.Parameter]], Callable[[], None]]


class _Arriving(NamedTuple):
    """Copies of a block's weights, of these dtypes, and the ticket of their way to the device."""

    dtypes: Sequence[torch.dtype]
    task: HostTask[tuple[list[torch.Tensor], Any]]


class BlockStream:
    """Copies of blocks' weights on their way to the device, and of gradients on their way back.

    What travels goes through a few pinned buffers, where it is cast: weights and gradients themselves lie
    wherever the host has them.

    :param weights: those of each block.
    :param resident: how many blocks may be on the device at once, at least two.
    :param allocate: makes the memory for a parameter's gradient.
    :ivar direction: 1 while blocks are used from first to last, -1 while from last to first.
    :ivar narrow: which of a block's weights travel in the format that they are computed in.
    """

    def __init__(
        self,
        weights: Sequence[tuple[nn.Parameter, ...]],
        resident: int,
        transfers: Transfers,
        allocate: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self.direction = 1
        self.narrow: dict[int, Sequence[bool]] = {}
        self._weights = weights
        self._resident = max(2, resident)
        self._transfers = transfers
        self._allocate = allocate
        self._on_device: OrderedDict[int, _Arriving] = OrderedDict()
        self._in_buffers, self._out_buffers = Buffers(transfers), Buffers(transfers)
        self._gradients: dict[nn.Parameter, torch.Tensor] = {}
        # Memory of gradients that nobody needs any more.
        self._spare: defaultdict[Any, list[torch.Tensor]] = defaultdict(list)
        self._pending: list[HostTask[None]] = []
        self._used: list[Any] = []
        self._step_on: StepOn | None = None
        self._calls_left: list[int] = []
        self._stepped: set[int] = set()
        self._prepared: list[tuple[int, Callable[[], None]]] = []
        self._begun_steps: dict[int, HostTask[None]] = {}

    def fetch(self, index: int, lower: torch.dtype | None = None) -> Weights:
        """The weights of a block on the device; those of the next one start on their way.

        :param lower: the format of what is computed, where that is not the weights'.
        """
        self._check_not_stepped(index)
        dtypes = self._dtypes(index, lower)
        arriving = self._on_device.pop(index, None)
        if arriving is None or arriving.dtypes != dtypes:
            arriving = self._start(index, dtypes)
        self._on_device[index] = arriving
        self._wait_for_space()
        # The next block's copy starts before this one is waited for; the oldest copies make room for it.
        following = index + self.direction
        there = 0 <= following < len(self._weights) and following not in self._stepped
        if there and following not in self._on_device:
            while len(self._on_device) >= self._resident:
                self._on_device.popitem(last=False)
            self._on_device[following] = self._start(following, self._dtypes(following, lower))
            self._on_device.move_to_end(index)
        copies, ticket = arriving.task.result()
        self._transfers.compute_after(ticket, copies)
        # Callers get tensors of their own, that autograd may mark.
        return tuple(copy.detach() for copy in copies)

    def store(self, index: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add gradients to those of a block in the host's memory, beside what is computed."""
        self._check_not_stepped(index)
        there = [(p, g) for p, g in zip(self._weights[index], gradients, strict=True) if g is not None]
        if usual := [(p, g) for p, g in there if is_plain(g)]:
            self._copy_to_host([p for p, _ in usual], [g.detach() for _, g in usual])
        if odd := [(p, g.to(p.device)) for p, g in there if not is_plain(g)]:
            self._add_later([p for p, _ in odd], [g for _, g in odd], None)
        if self._step_on is not None:
            # A block that is called several times has all of its gradients with the last of its calls.
            self._calls_left[index] -= 1
            if self._calls_left[index] == 0 and all(is_plain(p.detach()) for p in self._weights[index]):
                self._stepped.add(index)
                task = self._transfers.begin("out", functools.partial(self._step, self._step_on, index))
                self._pending.append(task)

    def step_beside(self, step_on: StepOn, uses: Sequence[int]) -> None:
        """Have the optimizer step on each block as soon as its gradients are complete, in what is computed
        backwards from here until :meth:`finish`.

        :param uses: from how many calls of each block gradients are to come; from 0, nothing is known of it.
        """
        self._step_on, self._calls_left = step_on, list(uses)

    def step_later(self, prepare: Prepare) -> None:
        """Take the gradients there are, for steps on them that :meth:`begin_steps` begins."""
        for index, weights in enumerate(self._weights):
            taken = [(p, p.grad) for p in weights if p.grad is not None]
            step = prepare([p for p, _ in taken])
            for parameter, _ in taken:
                parameter.grad = None
            if taken:
                self._prepared.append((index, functools.partial(self._step_with, step, taken)))

    def begin_steps(self) -> None:
        """Begin with what :meth:`step_later` has prepared, in the order in which blocks are used next."""
        for index, step in self._prepared:
            self._begun_steps[index] = self._transfers.begin("out", step)
        self._prepared.clear()

    def complete_step(self, index: int) -> None:
        """Wait for the step on a block that was begun."""
        if (step := self._begun_steps.get(index)) is not None:
            step.result()

    def complete_steps(self) -> None:
        """Wait for all steps that were begun."""
        for index in self._begun_steps:
            self.complete_step(index)
        self._begun_steps.clear()

    def finish(self) -> None:
        """Wait for all gradients and steps; weights on the device are old from here on."""
        self.complete_steps()
        for task in self._pending:
            task.result()
        for arriving in self._on_device.values():
            _, ticket = arriving.task.result()
            self._transfers.wait(ticket)
        self._pending.clear()
        self._on_device.clear()
        self._used.clear()
        self._step_on = None
        self._stepped.clear()

    def _check_not_stepped(self, index: int) -> None:
        if index in self._stepped:
            raise DoesNotFit(
                f"block {index} of those that spill streams is computed once more in the backward pass than "
                "in the forward pass, such as where the model re-computes several of its calls by itself; "
                "leave re-computation to spill"
            )

    def _dtypes(self, index: int, lower: torch.dtype | None) -> list[torch.dtype]:
        weights = self._weights[index]
        if lower is None or index not in self.narrow:
            return [weight.dtype for weight in weights]
        narrow = self.narrow[index]
        return [lower if n else weight.dtype for weight, n in zip(weights, narrow, strict=True)]

    def _start(self, index: int, dtypes: Sequence[torch.dtype]) -> _Arriving:
        return _Arriving(
            dtypes, self._transfers.begin("in", functools.partial(self._copy_to_device, index, dtypes))
        )

    @torch.no_grad()
    def _copy_to_device(self, index: int, dtypes: Sequence[torch.dtype]) -> tuple[list[torch.Tensor], Any]:
        self.complete_step(index)
        weights = [weight.detach() for weight in self._weights[index]]
        if not (self._transfers.staged and all(map(is_plain, weights))):
            return self._transfers.to_device([w.to(dtype) for w, dtype in zip(weights, dtypes, strict=True)])
        buffer = self._in_buffers.take(laid_out(weights, dtypes))
        staged = views(buffer, weights, dtypes)
        for place, weight in zip(staged, weights, strict=True):
            place.copy_(weight)
        copies, ticket = self._transfers.to_device(staged)
        self._in_buffers.give_back(buffer, functools.partial(self._transfers.wait, ticket))
        return copies, ticket

    def _copy_to_host(self, parameters: Sequence[nn.Parameter], gradients: Tensors) -> None:
        if not self._transfers.staged:
            self._add_later(parameters, gradients, None)
            return
        dtypes = [gradient.dtype for gradient in gradients]
        buffer = self._out_buffers.take(laid_out(gradients, dtypes))
        in_host = views(buffer, gradients, dtypes)
        ticket = self._transfers.to_host(gradients, in_host)
        task = self._add_later(parameters, in_host, ticket)
        self._out_buffers.give_back(buffer, task.result)

    def _add_later(self, parameters: Sequence[nn.Parameter], in_host: Tensors, ticket: Any) -> HostTask[None]:
        task = self._transfers.begin("out", functools.partial(self._add, parameters, in_host, ticket))
        self._pending.append(task)
        return task

    @torch.no_grad()
    def _add(self, parameters: Sequence[nn.Parameter], in_host: Tensors, ticket: Any) -> None:
        self._transfers.wait(ticket)
        for parameter, gradient in zip(parameters, in_host, strict=True):
            there = parameter.grad
            if gradient.layout != torch.strided or (there is not None and there.layout != torch.strided):
                parameter.grad = gradient if there is None else there + gradient
            elif there is not None:
                there.add_(gradient)
            else:
                if parameter not in self._gradients:
                    spare = self._spare[_format(parameter)]
                    self._gradients[parameter] = spare.pop() if spare else self._allocate(parameter)
                parameter.grad = self._gradients[parameter].copy_(gradient)

    def _step(self, step_on: StepOn, index: int) -> None:
        parameters = [p for p in self._weights[index] if p.grad is not None]
        if not all(p.grad is self._gradients.get(p) for p in parameters) or not step_on(parameters):
            return
        for parameter in parameters:
            parameter.grad = None
            self._spare[_format(parameter)].append(self._gradients.pop(parameter))

    def _step_with(
        self, step: Callable[[], None], taken: Sequence[tuple[nn.Parameter, torch.Tensor]]
    ) -> None:
        for parameter, gradient in taken:
            parameter.grad = gradient
        step()
        for parameter, gradient in taken:
            parameter.grad = None
            if self._gradients.get(parameter) is gradient:
                self._spare[_format(parameter)].append(self._gradients.pop(parameter))

    def _wait_for_space(self) -> None:
        """Keep the host from running so far ahead that blocks pile up on the device."""
        self._used.append(self._transfers.computed())
        if len(self._used) >= self._resident:
            self._transfers.wait(self._used.pop(0))


def _format(tensor: torch.Tensor) -> Any:
    return tensor.shape, tensor.stride(), tensor.dtype


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is torch's own and dense, so that its memory can be copied as it lies there."""
    return type(tensor) is torch.Tensor and tensor.layout == torch.strided
