"""What a model consists of: its blocks, what each of them needs, and where it can be cut between them.

Found by following the values of one forward pass, in training mode, in which everything is computed as it
is: shapes, types and containers are what they are, and nothing is assumed of the model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from saturn_airflow.launch.failures import ran_out_of_memory
from saturn_airflow.launch.request import DoesNotFit
from saturn_airflow.parallelism.blocks import blocks_to_run
from saturn_airflow.parallelism.module_state import ModuleState, parameters_of
from saturn_airflow.parallelism.sources import Follow, Sources

Block = tuple[str, nn.Module]

COMPUTES_GRADIENTS = (
    "the model or its loss computes gradients within the forward pass, for which that has to go through all "
    "blocks"
)


@dataclass(frozen=True)
class Arguments:
    """What a block is called with.

    :param spec: the structure of its arguments and keyword arguments.
    :param sent: which of their leaves are computed from what other blocks returned; a stage that begins with
        this block gets those from the stage before it, and computes the others itself.
    """

    spec: Any
    sent: tuple[int, ...]


@dataclass(frozen=True)
class TiedBlocks:
    """Blocks that can't be cut apart: something computed with block ``last`` needs block ``first`` itself."""

    first: int
    last: int
    why: str


@dataclass
class Anatomy:
    """What of a model belongs together.

    :param arguments: of each block.
    :param needs: for each block the parameters, its own included, that the stage with it computes with.
    :param everywhere: parameters that every stage needs, or that nobody was seen to use.
    :param work: of what is before the blocks, and of each block with what follows it.
    """

    blocks: Sequence[Block]
    arguments: list[Arguments] = field(default_factory=list)
    needs: list[set[nn.Parameter]] = field(default_factory=list)
    everywhere: set[nn.Parameter] = field(default_factory=set)
    ties: list[TiedBlocks] = field(default_factory=list)
    work: list[int] = field(default_factory=list)

    @property
    def places(self) -> list[int]:
        """Blocks that a stage may begin with, except the first."""
        bound = {place for tie in self.ties for place in range(tie.first + 1, tie.last + 1)}
        return [place for place in range(1, len(self.blocks)) if place not in bound]


def examine(model: nn.Module, run: Callable[[], Any], device: torch.device) -> Anatomy:
    """Take a model apart by following one forward pass; only what is being computed is on ``device``.

    :param model: on the CPU, in training mode; it is left as it was.
    :param run: runs it on inputs on ``device`` and returns its loss.
    :raises DoesNotFit: when it has no blocks that are called once each and in order, keeps state that each
        forward pass changes, or does not run on these inputs.
    """
    blocks = blocks_to_run(model)
    if not blocks:
        raise DoesNotFit("the model has no repeated blocks to make stages of")
    with ModuleState(model.modules()).put_back():
        return _examined(model, blocks, run, device)


def _examined(
    model: nn.Module, blocks: Sequence[Block], run: Callable[[], Any], device: torch.device
) -> Anatomy:
    state = _buffer_versions(model)
    in_blocks = {tensor for _, block in blocks for tensor in _parameters_and_buffers(block)}
    others = [tensor for tensor in _parameters_and_buffers(model) if tensor not in in_blocks]
    try:
        with torch.no_grad(), _moved_to(others, device):
            found = _follow_one_pass(model, blocks, run, device)
            if found.ties:
                # What a block put into a cache, for good, and others found there is no tie.
                found = _follow_one_pass(model, blocks, run, device)
    except DoesNotFit:
        raise
    except Exception as error:
        if ran_out_of_memory(error):
            raise
        reason = str(error) if str(error) else type(error).__name__
        if "does not require grad" in reason:
            raise DoesNotFit(COMPUTES_GRADIENTS) from error
        if "TensorWrapper" in reason or "functorch" in reason:
            raise DoesNotFit("the model transforms what computes its blocks, by torch.func") from error
        raise DoesNotFit(f"the model can't be run on a micro-batch alone: {reason}") from error
    if changed := [name for name, kept in _buffer_versions(model).items() if state.get(name, kept) != kept]:
        raise DoesNotFit(
            f"{changed[0]} changes in every forward pass, of which pipeline makes one for each of "
            "its micro-batches"
        )
    return found


def _follow_one_pass(
    model: nn.Module, blocks: Sequence[Block], run: Callable[[], Any], device: torch.device
) -> Anatomy:
    examination = _Examination(model, blocks, device)
    with examination.follow, examination.watching():
        loss = run()
    return examination.finish(loss)


class _Examination:
    """One forward pass, from the blocks' point of view."""

    def __init__(self, model: nn.Module, blocks: Sequence[Block], device: torch.device) -> None:
        self.follow = Follow()
        self._device = device
        self._parameters = list(parameters_of(model))
        for number, parameter in enumerate(self._parameters):
            self.follow.mark(parameter, 1 << number)
        self._found = Anatomy(blocks, needs=[set(parameters_of(block)) for _, block in blocks])
        self._order: list[int] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Have every call of a block come to :meth:`_call`."""
        blocks = [block for _, block in self._found.blocks]
        kept = [(block.__dict__.get("forward"), block._compiled_call_impl) for block in blocks]
        try:
            for index, block in enumerate(blocks):
                call = functools.partial(self._call, index, block, block.forward)
                block.forward = functools.wraps(block.forward)(call)
                block._compiled_call_impl = None
            yield
        finally:
            for block, (forward, compiled) in zip(blocks, kept, strict=True):
                block._compiled_call_impl = compiled
                if forward is None:
                    del block.forward
                else:
                    block.forward = forward

    def finish(self, loss: Any) -> Anatomy:
        """What was found; ``loss`` is what the whole pass was for."""
        found, last = self._found, len(self._found.blocks) - 1
        if self._order != list(range(last + 1)):
            called = ", ".join(found.blocks[index][0] for index in self._order[: last + 2]) or "none"
            raise DoesNotFit(
                f"the model does not call its blocks ({found.blocks[0][0]!r} and on) once each and in order, "
                f"but {called}; if it leaves out blocks by chance (LayerDrop), switch that off"
            )
        self._note_work()
        self._note_use(self.follow.of(loss), last, "what comes after the blocks")
        seen = set().union(*found.needs)
        found.everywhere |= {p for p in self._parameters if p not in seen}
        return found

    def _call(
        self, index: int, block: nn.Module, own: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        self._order.append(index)
        if self._order != list(range(index + 1)):
            return own(*args, **kwargs)  # it will be refused
        follow, name = self.follow, self._found.blocks[index][0]
        self._note_work()
        self._note_decisions(index)
        leaves, spec = _pytree.tree_flatten((args, kwargs))
        sent = []
        own_bit = self._block_bit(index)
        for number, leaf in enumerate(leaves):
            sources = follow.of(leaf)
            if not self._blocks_in(sources):
                # Computed by every stage from the inputs, and the parameters that it takes.
                self._note_use(sources, index, f"block {name!r}")
                continue
            self._note_use(sources, index - 1, f"block {name!r}")
            sent.append(number)
            leaves[number] = leaf.clone()
            follow.mark(leaves[number], own_bit)
        self._found.arguments.append(Arguments(spec, tuple(sent)))
        args, kwargs = _pytree.tree_unflatten(leaves, spec)
        follow.inside, follow.read = own_bit, 0
        with _moved_to(_parameters_and_buffers(block), self._device):
            output = own(*args, **kwargs)
        follow.inside = 0
        self._note_use(follow.read, index, f"block {name!r}")
        return _pytree.tree_map_only(torch.Tensor, functools.partial(self._marked_copy, own_bit), output)

    def _marked_copy(self, sources: Sources, tensor: torch.Tensor) -> torch.Tensor:
        fresh = tensor.clone()
        self.follow.mark(fresh, sources)
        return fresh

    def _note_decisions(self, following: int) -> None:
        """Note what decided by its value what the model does before block ``following``."""
        looked_at, self.follow.looked_at = self.follow.looked_at, 0
        self._found.everywhere |= self._parameters_in(looked_at)
        last = len(self._found.blocks) - 1
        if blocks := self._blocks_in(looked_at):
            name = self._found.blocks[following][0]
            why = f"what the model does before block {name!r} depends on values that"
            self._found.ties.append(TiedBlocks(min(blocks), last, why))

    def _note_use(self, sources: Sources, at: int, what: str) -> None:
        """Note that ``what``, computed by the stage of block ``at``, was computed from ``sources``."""
        self._found.needs[max(at, 0)] |= self._parameters_in(sources)
        blocks = self._blocks_in(sources)
        if blocks and min(blocks) < at:
            self._found.ties.append(TiedBlocks(min(blocks), at, f"{what} uses what"))

    def _note_work(self) -> None:
        self._found.work.append(self.follow.work)
        self.follow.work = 0

    def _block_bit(self, index: int) -> Sources:
        return 1 << (len(self._parameters) + index)

    def _parameters_in(self, sources: Sources) -> set[nn.Parameter]:
        return {p for number, p in enumerate(self._parameters) if sources >> number & 1}

    def _blocks_in(self, sources: Sources) -> list[int]:
        return [index for index in range(len(self._found.blocks)) if sources & self._block_bit(index)]


def _buffer_versions(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Which tensors the saved buffers are, and how often buffers and frozen parameters were written to."""
    saved = set(model.state_dict(keep_vars=True))
    state = {
        f"buffer {name!r}": (id(buffer) if name in saved else 0, buffer._version)
        for name, buffer in model.named_buffers()
    }
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    return state | {f"parameter {name!r}": (0, p._version) for name, p in frozen.items()}


def _parameters_and_buffers(module: nn.Module) -> list[torch.Tensor]:
    return [*parameters_of(module), *module.buffers()]


@contextmanager
def _moved_to(tensors: Iterable[torch.Tensor], device: torch.device) -> Iterator[None]:
    """Have tensors on ``device`` for a while."""
    held = [(tensor, tensor.data) for tensor in tensors]
    try:
        for tensor, data in held:
            tensor.data = data.to(device)
        yield
    finally:
        for tensor, data in held:
            tensor.data = data
