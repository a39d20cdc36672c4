"""Streaming a model's blocks between the host's memory and the device."""

from __future__ import annotations

import functools
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from saturn_airflow.launch.request import DoesNotFit
from saturn_airflow.parallelism.beside_steps import BesideSteps
from saturn_airflow.parallelism.block_stream import BlockStream, Weights, is_plain
from saturn_airflow.parallelism.blocks import blocks_to_run, own_forward
from saturn_airflow.parallelism.module_state import parameters_of
from saturn_airflow.parallelism.narrow_weights import WithoutHooks, autocast_dtype, narrow_weights
from saturn_airflow.parallelism.parallel import Parallel, multiply
from saturn_airflow.parallelism.recomputation import Compute, recomputed
from saturn_airflow.parallelism.transfers import Transfers, on
from saturn_airflow.training.losses.objective import Objective
from saturn_airflow.training.ranks import Ranks


class Spilled(Parallel):
    """A model on one device whose blocks' weights and gradients are in the host's memory.

    A block is computed with copies of its weights that live until it is done, and again in the backward
    pass, so at most ``resident`` blocks are on the device at any time, besides those that stay.

    :param folder: keep weights and gradients of the blocks in files there; None for memory.
    :param stay: how many of the first blocks stay on the device with all they have; at most all but one.
    :param transfers: how copies get there and back; None for how the device does it.
    :raises DoesNotFit: when the model has no blocks, or none with weights of its own, or the gradients of
        these have hooks.
    """

    def __init__(
        self,
        model: nn.Module,
        ranks: Ranks,
        resident: int,
        folder: str | None,
        *,
        stay: int = 0,
        transfers: Transfers | None = None,
    ) -> None:
        blocks = blocks_to_run(model)
        if not blocks:
            raise DoesNotFit("the model has no repeated blocks that could be spilled")
        staying, blocks = _split_blocks(model, blocks, stay)
        shared = _shared_weights(model, blocks)
        _refuse_hooks(blocks, shared)
        outside = [*_named_outside(model, blocks), *shared]
        spilled = {p for _, block in blocks for p in parameters_of(block) if p not in shared}
        super().__init__(model, ranks)
        host = _HostStore(folder)
        for parameter in outside:
            parameter.data = parameter.data.to(ranks.device)
        # By buffer: what two modules share, they share on the device.
        moved = {buffer: buffer.to(ranks.device) for buffer in model.buffers()}
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = moved[buffer]
        for parameter in spilled:
            parameter.data = host.place(parameter.data)
        weights = [tuple(_own_weights(block, shared)) for _, block in blocks]
        transfers = on(ranks.device) if transfers is None else transfers
        self._stream = BlockStream(weights, resident, transfers, host.empty_like)
        self._steps = BesideSteps(model, ranks.device, transfers)
        self._spilled = list(spilled)
        self._next_optimizer: torch.optim.Optimizer | None = None
        self._uses = [0] * len(blocks)
        for name, block in staying:
            block.forward = recomputed(name, block, own_forward(block))
        for index, (name, block) in enumerate(blocks):
            compute = _streamed(name, block, index, shared, self._stream, ranks.device.type)
            block.forward = self._counted(index, recomputed(name, block, compute))

    def step_beside(self, optimizer: torch.optim.Optimizer) -> None:
        """Have blocks stepped on in the backward pass, as soon as their gradients are complete."""
        self._steps.begin(optimizer)

    def backward(
        self, objective: Objective, batch: Any, samples: int, scale: float, last: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stream the blocks through the device, forward and then in the opposite order.

        :raises DoesNotFit: when something outside of the blocks uses their weights.
        """
        prepared, count = objective.prepare(batch, samples)
        self._stream.direction, self._uses = 1, [0] * len(self._uses)
        with self._blame_the_model(), _translated_errors(), self._steps.watching(self._spilled):
            total, over = objective(self.module, prepared, count)
        parts = self._part(total.detach()), self._part(over)
        if step_on := self._steps.of_micro_batch(parts, objective.batch_samples, last=last):
            self._stream.step_beside(step_on, self._uses)
        self._stream.direction = -1
        (total * scale).backward()  # type: ignore[no-untyped-call]
        return parts

    def evaluate(self, objective: Objective, batch: Any, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Stream the blocks through the device once."""
        self._stream.direction = 1
        return super().evaluate(objective, batch, samples)

    def finish_gradients(self) -> None:
        """Wait until all gradients are in the host's memory, and the steps that were taken on blocks are
        done."""
        self._stream.finish()
        self._steps.end()

    def drop_gradients(self) -> None:
        """Forget all gradients, and begin with the steps that :meth:`clip_gradients` prepared on them."""
        # Where a loss was no number, nobody has waited for them.
        self.finish_gradients()
        super().drop_gradients()
        self._stream.begin_steps()

    def step_later(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember who steps next: :meth:`clip_gradients` may leave steps on blocks to the next forward
        pass."""
        self._next_optimizer = optimizer

    def clip_gradients(self, max_norm: float) -> None:
        """Scale gradients on the device down at once, and those of blocks just before the step on each."""
        gradients = self._gradients()
        factor = self._clipping(gradients, max_norm)
        optimizer, self._next_optimizer = self._next_optimizer, None
        if optimizer is not None and all(map(is_plain, gradients)):
            prepare = self._steps.of_clipped(optimizer, factor)
            if prepare is not None:
                self._stream.step_later(prepare)
        multiply(self._gradients(), factor)

    def complete_steps(self) -> None:
        """Wait for the steps on blocks that were left to the next forward pass."""
        self._stream.complete_steps()

    def finish_evaluating(self) -> None:
        """Give up the copies on the device, which would outlive a change of the weights."""
        self._stream.finish()

    def _counted(self, index: int, forward: Compute) -> Compute:
        """``forward`` of a block, of which it is known how often it was called."""

        @functools.wraps(forward)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._uses[index] += torch.is_grad_enabled()
            # Whoever computes the block may note how often its weights were written to.
            self._stream.complete_step(index)
            return forward(*args, **kwargs)

        return counted


@contextmanager
def _translated_errors() -> Iterator[None]:
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


class _HostStore:
    """Where spilled tensors live: in memory, or in files."""

    def __init__(self, folder: str | None) -> None:
        self._folder = folder

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` in the host's memory, or in a file."""
        return tensor.to("cpu") if self._folder is None else self.empty_like(tensor).copy_(tensor)

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Memory for a tensor of this shape and format; a file has no name, and goes with the tensor."""
        if self._folder is None:
            return torch.empty_like(tensor, device="cpu")
        # The file has no name any more once it is open, so it goes when the tensor goes.
        with tempfile.NamedTemporaryFile(dir=self._folder, prefix="spilled-") as file:
            size = max(1, tensor.numel())
            flat = torch.from_file(file.name, shared=True, size=size, dtype=tensor.dtype)
        return flat[: tensor.numel()].view(tensor.shape)


class _Fetch(torch.autograd.Function):
    """From weights in the host's memory to copies on the device; gradients go the other way."""

    @staticmethod
    def forward(
        ctx: Any, stream: BlockStream, index: int, lower: torch.dtype | None, *weights: torch.Tensor
    ) -> Weights:
        ctx.stream, ctx.index = stream, index
        # A weight that takes no part in the loss gets no gradient, as it would without all this.
        ctx.set_materialize_grads(False)
        fetched = stream.fetch(index, lower)
        frozen = [copy for copy, weight in zip(fetched, weights, strict=True) if not weight.requires_grad]
        ctx.mark_non_differentiable(*frozen)
        return fetched

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, ...]:
        ctx.stream.store(ctx.index, gradients)
        return (None, None, None, *(None for _ in gradients))


def _streamed(
    name: str,
    block: nn.Module,
    index: int,
    shared: Collection[nn.Parameter],
    stream: BlockStream,
    device_type: str,
) -> Compute:
    """The forward pass of ``block`` with fetched weights, except for those that are ``shared``."""
    compiled = block._compiled_call_impl is not None
    bare = WithoutHooks(block, own_forward(block))
    own = _own_weights(bare, shared)
    names, weights = list(own.values()), tuple(own)

    def compute(
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        look: Callable[[Weights], object] = lambda fetched: None,
    ) -> Any:
        fetched = _Fetch.apply(stream, index, autocast_dtype(device_type), *weights)  # type: ignore[no-untyped-call]
        look(fetched)
        versions = [weight._version for weight in fetched]
        result = functional_call(bare, dict(zip(names, fetched, strict=True)), args, kwargs)
        _check_unchanged(name, names, fetched, versions)
        return result

    def variant(narrow: Sequence[bool], look: Callable[[Weights], object]) -> Compute:
        def of_these(*args: Any, **kwargs: Any) -> Any:
            stream.narrow[index] = narrow
            return compute(args, kwargs, look)

        return of_these

    @functools.wraps(block.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        lower = autocast_dtype(device_type)
        # Where gradients are wanted, what a block does to its inputs is noticed.
        if lower is not None and index not in stream.narrow and not compiled and torch.is_grad_enabled():
            found = narrow_weights(name, block, len(weights), lower, variant, args, kwargs)
            stream.narrow[index] = found
        return compute(args, kwargs)

    return forward


def _check_unchanged(block: str, names: Sequence[str], fetched: Weights, versions: Sequence[int]) -> None:
    """:raises DoesNotFit: where the forward pass of ``block`` wrote into weights, which are copies."""
    for name, weight, version in zip(names, fetched, versions, strict=True):
        if weight._version != version:
            raise DoesNotFit(
                f"block {block!r} changes its weight {name.removeprefix('block.')!r} in place in the forward "
                "pass, which would change a copy; change it after the optimizer's steps"
            )


def _split_blocks(
    model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], stay: int
) -> tuple[list[tuple[str, nn.Module]], list[tuple[str, nn.Module]]]:
    """The blocks that stay on the device, and those that have weights to stream.

    :param stay: how many of the first stay.
    :raises DoesNotFit: when none is left.
    """
    stay = min(stay, len(blocks) - 1)
    shared = _shared_weights(model, blocks[stay:])
    streamed = [(name, block) for name, block in blocks[stay:] if _own_weights(block, shared)]
    if not streamed:
        raise DoesNotFit("the model's blocks share all of their weights, so none could be spilled")
    return [one for one in blocks if one not in streamed], streamed


def _shared_weights(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]) -> dict[nn.Parameter, None]:
    """Those of the blocks' weights that another block has as well, or something outside of them."""
    outside = set(_named_outside(model, blocks))
    holders = Counter(p for _, block in blocks for p in set(parameters_of(block)))
    return dict.fromkeys(
        p for _, block in blocks for p in parameters_of(block) if p in outside or holders[p] > 1
    )


def _own_weights(module: nn.Module, shared: Collection[nn.Parameter]) -> dict[nn.Parameter, str]:
    """The weights of ``module`` that are not ``shared``, with their names."""
    return {p: name for name, p in nn.Module.named_parameters(module) if p not in shared}


def _refuse_hooks(blocks: Sequence[tuple[str, nn.Module]], shared: Collection[nn.Parameter]) -> None:
    for block_name, block in blocks:
        for parameter, name in _own_weights(block, shared).items():
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                raise DoesNotFit(
                    f"parameter {f'{block_name}.{name}'!r} has a hook on its gradient, which spill does not "
                    "call; change the gradient in the model's forward pass or in the optimizer"
                )


def _named_outside(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]) -> list[nn.Parameter]:
    """Parameters of the modules that are in no block."""
    inside = {module for _, block in blocks for module in block.modules()}
    return [p for module in model.modules() if module not in inside for p in module.parameters(recurse=False)]
