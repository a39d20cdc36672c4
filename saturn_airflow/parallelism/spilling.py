"""Streaming a model's blocks between the host's memory and the device."""

from __future__ import annotations

import functools
import tempfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from saturn_airflow.launch.request import DoesNotFit
from saturn_airflow.parallelism.blocks import find_blocks, own_forward
from saturn_airflow.parallelism.parallel import Parallel
from saturn_airflow.parallelism.recomputation import Compute, recomputed
from saturn_airflow.training.losses.objective import Objective
from saturn_airflow.training.ranks import Ranks

Weights = tuple[torch.Tensor, ...]


class Spilled(Parallel):
    """A model on one device whose blocks' weights and gradients are in the host's memory.

    A block is computed with copies of its weights that live until it is done, and again in the backward
    pass, so at most ``resident`` blocks are on the device at any time.

    :param folder: keep weights and gradients of the blocks in files there; None for memory.
    :raises DoesNotFit: when the model has no blocks, they share weights with something, or their gradients
        have hooks.
    """

    def __init__(self, model: nn.Module, ranks: Ranks, resident: int, folder: str | None) -> None:
        blocks = find_blocks(model)
        if not blocks:
            raise DoesNotFit("the model has no repeated blocks that could be spilled")
        outside = _named_outside(model, [block for _, block in blocks])
        _check_weights(blocks, set(outside))
        spilled = {p for _, block in blocks for p in block.parameters()}
        super().__init__(model, ranks)
        self._home = _Home(ranks.device, folder)
        for parameter in outside:
            parameter.data = parameter.data.to(ranks.device)
        moved = {buffer: buffer.to(ranks.device) for buffer in model.buffers()}
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = moved[buffer]
        for parameter in spilled:
            parameter.data = self._home.place(parameter.data)
        self._stream = _WeightPrefetcher(
            [tuple(block.parameters()) for _, block in blocks], ranks.device, resident, self._home
        )
        for index, (name, block) in enumerate(blocks):
            block.forward = recomputed(name, block, _streamed(name, block, index, self._stream))

    def backward(
        self, objective: Objective, batch: Any, samples: int, scale: float, last: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        prepared, count = objective.prepare(batch, samples)
        self._stream.direction = 1
        with self._whose_fault(), _at_home():
            total, over = objective(self.module, prepared, count)
        self._stream.direction = -1
        (total * scale).backward()  # type: ignore[no-untyped-call]
        return self._part(total.detach()), self._part(over)

    def evaluate(self, objective: Objective, batch: Any, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._stream.direction = 1
        return super().evaluate(objective, batch, samples)

    def finish_gradients(self) -> None:
        self._stream.finish()

    def finish_evaluating(self) -> None:
        """Give up the copies on the device, which would outlive a change of the weights."""
        self._stream.finish()


@contextmanager
def _at_home() -> Iterator[None]:
    """Around a forward pass, in which only the blocks themselves find their weights on the device."""
    try:
        yield
    except RuntimeError as error:
        if "same device" not in str(error):
            raise
        raise DoesNotFit(
            "something outside of the model's blocks, or a hook on one of them, uses their weights, which "
            f"spill keeps in the host's memory ({error})"
        ) from error


class _Home:
    """Where spilled tensors live: pinned memory for a GPU, files, or plain memory."""

    def __init__(self, device: torch.device, folder: str | None) -> None:
        self._pin = device.type == "cuda" and folder is None
        self._folder = folder

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of ``tensor`` at home."""
        return self.empty_like(tensor).copy_(tensor)

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._folder is None:
            return torch.empty_like(tensor, device="cpu", pin_memory=self._pin)
        # The file has no name any more once it is open, so it goes when the tensor goes.
        with tempfile.NamedTemporaryFile(dir=self._folder, prefix="spilled-") as file:
            size = max(1, tensor.numel())
            flat = torch.from_file(file.name, shared=True, size=size, dtype=tensor.dtype)
        return flat[: tensor.numel()].view(tensor.shape)


class _WeightPrefetcher:
    """Copies of blocks' weights on their way to the device, and of gradients on their way back.

    :ivar direction: 1 while blocks are used from first to last, -1 while from last to first.
    """

    def __init__(
        self, weights: Sequence[tuple[nn.Parameter, ...]], device: torch.device, resident: int, home: _Home
    ):
        self.direction = 1
        self._weights = weights
        self._device = device
        self._resident = max(2, resident)
        self._home = home
        self._here: OrderedDict[int, tuple[Weights, Any]] = OrderedDict()
        self._homes: dict[nn.Parameter, torch.Tensor] = {}
        on_gpu = device.type == "cuda"
        self._fetching = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._returning = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._used: list[Any] = []

    def fetch(self, index: int) -> Weights:
        """The weights of a block on the device; those of the next one start on their way."""
        copies, arrived = self._here.pop(index) if index in self._here else self._start(index)
        self._here[index] = copies, arrived
        self._wait_for_space()
        following = index + self.direction
        if 0 <= following < len(self._weights) and following not in self._here:
            while len(self._here) >= self._resident:
                self._here.popitem(last=False)
            self._here[following] = self._start(following)
            self._here.move_to_end(index)
        if arrived is not None:
            compute = torch.cuda.current_stream(self._device)
            compute.wait_event(arrived)
            for copy in copies:
                copy.record_stream(compute)
        # Callers get tensors of their own, that autograd may mark.
        return tuple(copy.detach() for copy in copies)

    def store(self, index: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add gradients to those of a block at home."""
        if self._returning is not None:
            self._returning.wait_stream(torch.cuda.current_stream(self._device))
        for parameter, gradient in zip(self._weights[index], gradients, strict=True):
            if gradient is None:
                continue
            if gradient.layout != torch.strided:
                here = gradient.to(parameter.device)
                parameter.grad = here if parameter.grad is None else parameter.grad + here
                continue
            if parameter.grad is not None:
                if self._returning is not None:
                    self._returning.synchronize()
                parameter.grad.add_(gradient.to(parameter.device))
                continue
            if parameter not in self._homes:
                self._homes[parameter] = self._home.empty_like(parameter)
            home = parameter.grad = self._homes[parameter]
            if self._returning is None:
                home.copy_(gradient)
            else:
                with torch.cuda.stream(self._returning):
                    home.copy_(gradient, non_blocking=True)
                gradient.record_stream(self._returning)

    def finish(self) -> None:
        """Wait for all gradients; weights on the device are old from here on."""
        if self._returning is not None:
            self._returning.synchronize()
        self._here.clear()
        self._used.clear()

    def _start(self, index: int) -> tuple[Weights, Any]:
        if self._fetching is None:
            return tuple(weight.detach().clone() for weight in self._weights[index]), None
        with torch.cuda.stream(self._fetching):
            copies = tuple(
                weight.detach().to(self._device, non_blocking=True) for weight in self._weights[index]
            )
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(self._fetching)
        return copies, arrived

    def _wait_for_space(self) -> None:
        """Keep the host from running so far ahead that blocks pile up on the device."""
        if self._fetching is None:
            return
        used = torch.cuda.Event()  # type: ignore[no-untyped-call]
        used.record(torch.cuda.current_stream(self._device))
        self._used.append(used)
        if len(self._used) >= self._resident:
            self._used.pop(0).synchronize()


class _Fetch(torch.autograd.Function):
    """From weights at home to copies on the device, and from the copies' gradients to gradients at home."""

    @staticmethod
    def forward(ctx: Any, stream: _WeightPrefetcher, index: int, *weights: torch.Tensor) -> Weights:
        ctx.stream, ctx.index = stream, index
        # A weight that takes no part in the loss gets no gradient, as it would without all this.
        ctx.set_materialize_grads(False)
        fetched = stream.fetch(index)
        frozen = [copy for copy, weight in zip(fetched, weights, strict=True) if not weight.requires_grad]
        ctx.mark_non_differentiable(*frozen)
        return fetched

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, ...]:
        ctx.stream.store(ctx.index, gradients)
        return (None, None, *(None for _ in gradients))


class _Bare(nn.Module):
    """A block without the hooks that run around its forward pass: they run outside of this."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.own_forward = own_forward(block)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.own_forward(*args, **kwargs)


def _streamed(name: str, block: nn.Module, index: int, stream: _WeightPrefetcher) -> Compute:
    """The forward pass of ``block`` with fetched weights."""
    bare = _Bare(block)
    names = [name for name, _ in bare.named_parameters()]
    weights = tuple(bare.parameters())

    @functools.wraps(block.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        fetched = _Fetch.apply(stream, index, *weights)  # type: ignore[no-untyped-call]
        versions = [weight._version for weight in fetched]
        result = functional_call(bare, dict(zip(names, fetched, strict=True)), args, kwargs)
        for short_name, weight, version in zip(names, fetched, versions, strict=True):
            if weight._version != version:
                raise DoesNotFit(
                    f"block {name!r} changes its weight {short_name.removeprefix('block.')!r} in place in "
                    "the forward pass, which would change a copy; change it after the optimizer's steps"
                )
        return result

    return forward


def _check_weights(blocks: Sequence[tuple[str, nn.Module]], outside: set[nn.Parameter]) -> None:
    owners: dict[nn.Parameter, str] = {}
    for block_name, block in blocks:
        for name, parameter in block.named_parameters():
            full_name = f"{block_name}.{name}"
            if parameter in outside or owners.setdefault(parameter, full_name) != full_name:
                raise DoesNotFit(
                    "the model's blocks share weights with each other or with other parts of it "
                    f"({full_name!r} among them)"
                )
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                raise DoesNotFit(
                    f"parameter {full_name!r} has a hook on its gradient, which spill does not call; "
                    "change the gradient in the model's forward pass or in the optimizer"
                )


def _named_outside(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Parameters of the modules that are in no block."""
    inside = {module for block in blocks for module in block.modules()}
    return [p for module in model.modules() if module not in inside for p in module.parameters(recurse=False)]
