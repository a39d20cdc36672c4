"""Cutting a model into stages that keep the names of their parameters.

A stage runs the model's own ``forward``. What is not the stage's own is arranged so that this costs next to
nothing: parameters that it does not need are replaced by a NaN that only has their shape, blocks before the
stage return NaN shaped like what they returned where they were computed, the first own block takes what the
stage before has sent, and the first block after the stage leaves the forward pass. So masks, positions and
whatever else a model derives from its inputs are there on every stage, whatever the model is, as long as it
calls its blocks one after the other. Should a model use what a stage lacks, the loss is NaN, never wrong.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils import _pytree

from saturn_airflow.launch.failures import ran_out_of_memory
from saturn_airflow.launch.request import DoesNotFit
from saturn_airflow.parallelism.anatomy import COMPUTES_GRADIENTS, Anatomy
from saturn_airflow.parallelism.blocks import own_forward
from saturn_airflow.parallelism.module_state import parameters_of
from saturn_airflow.training import rng
from saturn_airflow.training.without_group import without_group

_CONSTANTS = (bool, int, float, str, bytes, torch.Size, torch.dtype, torch.device, type(None))


class LeaveForward(BaseException):
    """Ends a forward pass after a stage's last block; no ``except Exception`` on the way may stop it."""


@dataclass(frozen=True)
class TensorLike:
    """What a tensor looks like."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def lacking(self, device: torch.device) -> torch.Tensor:
        """A tensor that stands for one that is not here: NaN, or 0 where the type has none."""
        floats = self.dtype.is_floating_point or self.dtype.is_complex
        return torch.full(self.shape, torch.nan if floats else 0, dtype=self.dtype, device=device)


@dataclass
class StageOutputs:
    """What a stage hands on.

    :param tensors: those arguments of the next stage's first block that it can't compute itself.
    :param returned: what each block so far returned, with a :class:`TensorLike` for every tensor.
    """

    tensors: list[torch.Tensor] = field(default_factory=list)
    returned: list[Any] = field(default_factory=list)


def choose_cuts(anatomy: Anatomy, stages: int) -> list[int]:
    """The blocks that the second stage and those after it begin with, so that the most work of any is least.

    It follows from the model and the shapes of its inputs alone.

    :raises DoesNotFit: when the model can't be cut into so many stages.
    """
    count, places = len(anatomy.blocks), anatomy.places
    if count < stages:
        raise DoesNotFit(f"the model has {count} repeated blocks, too few for {stages} stages")
    if len(places) < stages - 1:
        tie = anatomy.ties[0]
        raise DoesNotFit(
            f"the model can be cut in {len(places)} places, too few for {stages} stages: {tie.why} block "
            f"{anatomy.blocks[tie.first][0]!r} computed"
        )
    before, *blocks = anatomy.work
    return balance(before, blocks, places, stages)


def balance(before: float, blocks: Sequence[float], places: Sequence[int], stages: int) -> list[int]:
    """First blocks of the stages after the first, out of ``places``, so that the largest stage is least.

    :param before: the work before the blocks; it goes to the first stage.
    :param blocks: the work of each block.
    """
    assert len(places) >= stages - 1
    sums = [0.0, *itertools.accumulate(blocks)]

    def size(start: int, end: int) -> float:
        return sums[end] - sums[start] + before * (start == 0)

    # Linear partition by dynamic programming: one stage more in each turn of the loop.
    # best[end]: the largest stage and the cuts, when the stages so far hold the blocks up to end.
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for stage in range(stages):
        ends = places if stage < stages - 1 else [len(blocks)]
        options = {
            end: [
                (max(largest, size(start, end)), [*cuts, end])
                for start, (largest, cuts) in best.items()
                if start < end
            ]
            for end in ends
        }
        best = {end: min(found) for end, found in options.items() if found}
    return best[len(blocks)][1][:-1]


def check_cuts(anatomy: Anatomy, cuts: Sequence[int], stages: int) -> None:
    """Check cuts that were chosen earlier.

    :raises DoesNotFit: when the model can't be cut like that.
    """
    if len(cuts) != stages - 1 or list(cuts) != sorted(set(cuts)) or not set(cuts) <= set(anatomy.places):
        raise DoesNotFit(
            f"cuts={list(cuts)} do not make {stages} stages of this model, which has {len(anatomy.blocks)} "
            f"blocks and can be cut before any of {anatomy.places}; leave cuts out to have them chosen"
        )


def holders(anatomy: Anatomy, cuts: Sequence[int], model: nn.Module) -> dict[nn.Parameter, list[int]]:
    """The stages that need each parameter."""
    edges = [0, *cuts, len(anatomy.blocks)]
    needs = [set().union(*anatomy.needs[a:b]) for a, b in itertools.pairwise(edges)]
    return {
        p: [stage for stage, needed in enumerate(needs) if p in needed or p in anatomy.everywhere]
        for p in parameters_of(model)
    }


@dataclass
class _ForwardPass:
    """One forward pass of a stage."""

    position: tuple[int, ...]
    arrived: StageOutputs
    trains: bool
    next: int = 0
    leaving: StageOutputs | None = None


class Stage:
    """The blocks ``own`` of a model, and what the model does before, between or after them.

    It draws random numbers seeded by the position of the micro-batch, and by the block's number for every
    block, so that they do not depend on how the model is cut.

    :param keep: parameters that it needs; the others leave ``model``.
    """

    def __init__(
        self,
        model: nn.Module,
        anatomy: Anatomy,
        own: range,
        keep: set[nn.Parameter],
        device: torch.device,
    ) -> None:
        self._anatomy = anatomy
        self._own = own
        self._device = device
        self._is_last = own.stop == len(anatomy.blocks)
        self._passage: _ForwardPass | None = None
        _drop_parameters(model, keep, device)
        for index, (_, block) in enumerate(anatomy.blocks):
            compute = own_forward(block)  # what a stage does around it is not compiled with it
            call = functools.partial(self._call, index, compute)
            block.forward = functools.wraps(compute)(call)

    def run(self, compute: Callable[[], Any], position: tuple[int, ...], arrived: StageOutputs) -> Any:
        """What ``compute``, which runs the model, returns in the last stage; :class:`StageOutputs` in others.

        :param position: of the micro-batch.
        :param arrived: from the stage before.
        :raises DoesNotFit: when the model does not call its blocks as it did before.
        """
        passage = self._passage = _ForwardPass(position, arrived, torch.is_grad_enabled())
        rng.seed(*position)
        result = None
        try:
            with without_group():  # other ranks run other parts of the job's code
                result = compute()
        except LeaveForward:
            pass
        except Exception as error:
            if passage.leaving is None:
                self._explain(error, passage)
        finally:
            self._passage = None
        if self._is_last and passage.next == self._own.stop:
            return result
        if not self._is_last and passage.leaving is not None:
            return passage.leaving
        raise DoesNotFit(f"the model did not call block {self._name(passage.next)!r}, as it did before")

    def _call(self, index: int, compute: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        passage, own = self._passage, self._own
        if passage is None:
            raise DoesNotFit(
                f"block {self._name(index)!r} is called outside of the model's forward pass, as by gradient "
                "checkpointing around the blocks; leave that to pipeline, which does it where it is needed"
            )
        if passage.leaving is not None:
            raise LeaveForward  # somebody caught the first one
        if index != passage.next:
            raise DoesNotFit(
                f"the model called block {self._name(index)!r} when it was the turn of block "
                f"{self._name(passage.next)!r}"
            )
        if index < own.start:
            passage.next += 1
            return _pytree.tree_map_only(
                TensorLike, lambda like: like.lacking(self._device), passage.arrived.returned[index]
            )
        self._check_gradients(index, passage, args, kwargs)
        if index == own.stop:
            tensors = [self._leaf(index, args, kwargs)[number] for number in self._sent(index)]
            passage.leaving = StageOutputs(tensors, passage.arrived.returned)
            raise LeaveForward
        if index == own.start:
            leaves = self._leaf(index, args, kwargs)
            for number, tensor in zip(self._sent(index), passage.arrived.tensors, strict=True):
                leaves[number] = tensor
            args, kwargs = _pytree.tree_unflatten(leaves, self._anatomy.arguments[index].spec)
        rng.seed(*passage.position, index)
        returned = compute(*args, **kwargs)
        passage.next += 1
        if not self._is_last:
            passage.arrived.returned.append(self._describe(index, returned))
        return returned

    def _check_gradients(self, index: int, passage: _ForwardPass, args: Any, kwargs: Any) -> None:
        """Refuse blocks whose gradients are computed otherwise than by going backward through them."""
        if passage.trains and not torch.is_grad_enabled():
            leaves = _pytree.tree_leaves((args, kwargs))
            if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
                raise DoesNotFit(
                    f"block {self._name(index)!r} is called without recording gradients, as by reentrant "
                    "checkpoints around the blocks; leave that to pipeline, which does it where it is needed"
                )

    def _sent(self, index: int) -> Sequence[int]:
        return self._anatomy.arguments[index].sent

    def _leaf(self, index: int, args: Any, kwargs: Any) -> list[Any]:
        leaves, spec = _pytree.tree_flatten((args, kwargs))
        if spec != self._anatomy.arguments[index].spec:
            raise DoesNotFit(f"block {self._name(index)!r} is called with other arguments than before")
        return leaves

    def _describe(self, index: int, returned: Any) -> Any:
        leaves, spec = _pytree.tree_flatten(returned)
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                leaves[number] = TensorLike(tuple(leaf.shape), leaf.dtype)
            elif not isinstance(leaf, _CONSTANTS):
                raise DoesNotFit(
                    f"block {self._name(index)!r} returns a {type(leaf).__name__}; between stages go tensors "
                    "and numbers, in tuples, lists and mappings"
                )
        return _pytree.tree_unflatten(leaves, spec)

    def _name(self, index: int) -> str:
        return self._anatomy.blocks[min(index, len(self._anatomy.blocks) - 1)][0]

    def _explain(self, error: Exception, passage: _ForwardPass) -> NoReturn:
        """Raise ``error``, or what it means where it may come from what this stage lacks."""
        if "have been used in the graph" in str(error) or "does not require grad" in str(error):
            raise DoesNotFit(COMPUTES_GRADIENTS) from error
        memory = ran_out_of_memory(error)
        if isinstance(error, DoesNotFit) or memory or passage.next > self._own.start or not self._own.start:
            raise error
        raise DoesNotFit(
            f"what the model does before block {self._name(passage.next)!r} does not run on a stage that "
            f"lacks the blocks before it: {type(error).__name__}: {error}"
        ) from error


def _drop_parameters(model: nn.Module, keep: set[nn.Parameter], device: torch.device) -> None:
    """Leave of ``model`` the parameters ``keep``, and put it on ``device``."""
    nothing = {
        dtype: TensorLike((), dtype).lacking(device) for dtype in {p.dtype for p in parameters_of(model)}
    }
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter not in keep:
                del module._parameters[name]
                object.__setattr__(module, name, nothing[parameter.dtype].expand(parameter.shape))
    model.to(device)
