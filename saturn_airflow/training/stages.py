"""Cutting a model into stages that keep the names of their parameters.

A stage runs the model's own ``forward``. What is not the stage's own is arranged so that this costs next to
nothing: parameters of other stages are replaced by a zero that only has their shape, blocks before the stage
pass their input on, the first own block takes what the stage before has sent, and the first block after the
stage leaves the forward pass. So masks, positions and whatever else a model derives from its inputs are
there on every stage, whatever the model is, as long as it calls its blocks one after the other and
nothing but a tensor of hidden states runs through them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from saturn_airflow.training.blocks import find_blocks
from saturn_airflow.training.precision import map_tensors
from saturn_airflow.training.request import DoesNotFit

Block = tuple[str, nn.Module]


class LeaveForward(BaseException):
    """Carries hidden states out of a model's forward pass; no ``except Exception`` on the way may stop it."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


@dataclass(frozen=True)
class Anatomy:
    """What of a model lies before its blocks, and what after.

    :param before: parameters that the blocks' input depends on.
    :param after: parameters used after the last block; tied weights are in both.
    """

    blocks: Sequence[Block]
    before: frozenset[nn.Parameter]
    after: frozenset[nn.Parameter]


def find_anatomy(model: nn.Module, run: Callable[[], torch.Tensor], stages: int) -> Anatomy:
    """Take a model apart by looking at one forward pass in which its blocks do nothing.

    :param run: runs the model, on the CPU, and returns its loss.
    :raises DoesNotFit: when the model can't be cut into so many stages.
    """
    blocks = find_blocks(model)
    if len(blocks) < stages:
        raise DoesNotFit(f"the model has {len(blocks)} repeated blocks, too few for {stages} stages")
    order: list[str] = []
    entered: list[torch.Tensor] = []
    left: list[torch.Tensor] = []

    def watch(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        if not args or not isinstance(args[0], torch.Tensor):
            raise DoesNotFit(f"block {name!r} does not take hidden states as its first argument")
        others: list[torch.Tensor] = []
        map_tensors(
            lambda tensor: others.append(tensor) if tensor.requires_grad else None, [args[1:], kwargs]
        )
        if others:
            raise DoesNotFit(f"block {name!r} takes more than hidden states from what is trained before it")
        order.append(name)
        if len(order) == 1:
            entered.append(args[0])
            left.append(args[0].detach().requires_grad_())
            return left[0]
        return args[0]

    frozen = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point()]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        first_name = blocks[0][0]
        with _forwards(blocks, watch), torch.enable_grad():
            loss = run()
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
    if order != [name for name, _ in blocks]:
        raise DoesNotFit(f"the model does not call its blocks ({first_name!r} and on) once each and in order")
    before, after = _leaves(entered), _leaves([loss])
    of_blocks = {p for _, block in blocks for p in block.parameters()}
    if shared := (before | after) & of_blocks:
        name = next(name for name, p in model.named_parameters() if p in shared)
        raise DoesNotFit(f"parameter {name!r} is used inside and outside of the blocks")
    if sum(len(list(block.parameters())) for _, block in blocks) != len(of_blocks):
        raise DoesNotFit(f"the model's blocks ({first_name!r} and on) share parameters")
    return Anatomy(blocks, frozenset(before), frozenset(after))


def measure(
    model: nn.Module, anatomy: Anatomy, run: Callable[[], torch.Tensor], device: torch.device
) -> tuple[float, list[float], float]:
    """Seconds of a forward and backward pass: before the blocks, of each block, and after them.

    Blocks whose parameters have the same shapes are taken to be equally fast. The model is on the CPU before
    and after; only what is being measured is on ``device``.

    :param run: runs the model on inputs on ``device`` and returns its loss.
    """
    names = dict(anatomy.blocks)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def skip(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        calls.append((args, kwargs))
        hidden: torch.Tensor = args[0]
        return hidden

    def leave(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        raise LeaveForward(args[0])

    def only_before() -> torch.Tensor:
        with _forwards(anatomy.blocks, leave):
            try:
                run()
            except LeaveForward as left:
                return left.hidden
        raise AssertionError

    def around() -> torch.Tensor:
        calls.clear()
        with _forwards(anatomy.blocks, skip):
            return run()

    of_blocks = {p for block in names.values() for p in block.parameters()}
    others = [p for p in model.parameters() if p not in of_blocks]
    buffers = list(model.buffers())
    with _moved([*others, *buffers], device):
        before = _seconds(only_before, device)
        after = max(0.0, _seconds(around, device) - before)
        (hidden, *args), kwargs = calls[0][0], calls[0][1]
        hidden = hidden.detach().requires_grad_()
        known: dict[Any, float] = {}
        times = []
        for block in names.values():
            signature = (type(block), tuple(p.shape for p in block.parameters()))
            if signature not in known:
                with _moved(block.parameters(), device):
                    known[signature] = _seconds(lambda block=block: block(hidden, *args, **kwargs), device)  # type: ignore[misc]
            times.append(known[signature])
    return before, times, after


def balance(before: float, blocks: Sequence[float], after: float, stages: int) -> list[range]:
    """The blocks of each stage, at least one, so that the slowest stage is as fast as can be.

    What is before the blocks goes to the first stage, what is after to the last.
    """
    count = len(blocks)
    assert count >= stages
    sums = [0.0]
    for seconds in blocks:
        sums.append(sums[-1] + seconds)

    def cost(stage: int, first: int, end: int) -> float:
        return sums[end] - sums[first] + before * (stage == 0) + after * (stage == stages - 1)

    # best[end]: the slowest stage and the cuts, when the stages so far hold the blocks up to end.
    best: dict[int, tuple[float, list[range]]] = {0: (0.0, [])}
    for stage in range(stages):
        ends = range(stage + 1, count - (stages - stage - 1) + 1) if stage < stages - 1 else [count]
        best = {
            end: min(
                (
                    (max(slowest, cost(stage, first, end)), [*cuts, range(first, end)])
                    for first, (slowest, cuts) in best.items()
                    if first < end
                ),
                key=lambda option: option[0],
            )
            for end in ends
        }
    return best[count][1]


def cut(
    model: nn.Module,
    anatomy: Anatomy,
    own: range,
    device: torch.device,
    receive: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Leave of ``model`` only the stage with the blocks ``own``, on ``device``.

    :param receive: gets a tensor like the hidden states that enter the stage, and returns them.
    """
    blocks = anatomy.blocks
    is_first, is_last = own.start == 0, own.stop == len(blocks)
    of_blocks = {p for _, block in blocks for p in block.parameters()}
    kept = {p for i in own for p in blocks[i][1].parameters()}
    kept |= anatomy.before if is_first else frozenset()
    kept |= anatomy.after if is_last else frozenset()
    if is_first:
        kept |= {p for p in model.parameters() if p not in of_blocks | anatomy.before | anatomy.after}
    zeros = {
        dtype: torch.zeros((), dtype=dtype, device=device) for dtype in {p.dtype for p in model.parameters()}
    }
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter not in kept:
                del module._parameters[name]
                object.__setattr__(module, name, zeros[parameter.dtype].expand(parameter.shape))
    model.to(device)
    for index, (_, block) in enumerate(blocks):
        if index < own.start:
            block.forward = _pass_on
        elif index == own.stop:
            block.forward = _leave
    if not is_first:

        def enter(block: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (receive(args[0]), *args[1:])

        blocks[own.start][1].register_forward_pre_hook(enter)


def _pass_on(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return hidden


def _leave(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    raise LeaveForward(hidden)


@contextmanager
def _forwards(
    blocks: Sequence[Block], forward: Callable[[str, tuple[Any, ...], dict[str, Any]], torch.Tensor]
) -> Iterator[None]:
    """Put ``forward(name, args, kwargs)`` in the place of the blocks' own."""
    own = [block.__dict__.get("forward") for _, block in blocks]
    try:
        for name, block in blocks:
            block.forward = lambda *args, _name=name, **kwargs: forward(_name, args, kwargs)
        yield
    finally:
        for (_, block), original in zip(blocks, own, strict=True):
            if original is None:
                del block.forward
            else:
                block.forward = original


@contextmanager
def _moved(tensors: Any, device: torch.device) -> Iterator[None]:
    """Have tensors on ``device`` for a while."""
    held = [(tensor, tensor.data) for tensor in tensors]
    try:
        for tensor, data in held:
            tensor.data = data.to(device)
        yield
    finally:
        for tensor, data in held:
            tensor.data = data


def _seconds(compute: Callable[[], torch.Tensor], device: torch.device, repeats: int = 3) -> float:
    """The least seconds of a forward and backward pass; gradients are thrown away."""
    taken = []
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        result = compute()
        inputs = list(_leaves([result]))
        if inputs:
            torch.autograd.grad(result.sum(), inputs)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - began)
    return min(taken)


def _leaves(tensors: Sequence[torch.Tensor]) -> set[Any]:
    """The tensors that gradients of ``tensors`` would end in."""
    found: set[Any] = set()
    seen: set[Any] = set()
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(node.variable)
        waiting.extend(function for function, _ in node.next_functions)
    return found
