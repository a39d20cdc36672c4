"""Every rank holds a shard of each parameter and gathers the whole when it is needed (torch's FSDP2).

FSDP gathers a unit, such as a block, when its forward is called, and reduces gradients after its backward. So
all ranks must call all units in one order. Where a rank's model passes over a unit, as stochastic depth
does, the unit is gathered there all the same and hands on what it is given; what can't be mended like that is
noticed before anything wrong is exchanged. What is not public of FSDP is used here alone.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._common_utils import collect_grad_tensors
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.utils import _pytree

from saturn_airflow.launch.request import DoesNotFit
from saturn_airflow.model.errors import JobError
from saturn_airflow.parallelism.agreeing import NOTHING_MORE, Agreement
from saturn_airflow.parallelism.blocks import find_blocks
from saturn_airflow.parallelism.module_state import parameters_of
from saturn_airflow.parallelism.narrow_gathers import NarrowGathers
from saturn_airflow.parallelism.parallel import Kernels, Parallel, forget_missing
from saturn_airflow.training.losses.objective import Objective
from saturn_airflow.training.nested import tensors_in
from saturn_airflow.training.ranks import Ranks
from saturn_airflow.training.without_group import without_group

FIX = "use fsdp's parameter by_block=False, which gathers all of the model at once, or another technique"
# What torch says when FSDP is used as it can't be, and what that means.
_MEANINGS = {
    "mixed torch.Tensor and DTensor": (
        "weights are used outside of the forward pass that FSDP has gathered them for"
    ),
    "out of bounds for storage of size 0": (
        "weights are used when FSDP has let go of them, as by a hook that computes gradients itself"
    ),
    "is a view and is being modified inplace": "a tensor that a block is called with is changed in place",
}


def units_of(model: nn.Module) -> list[nn.Module]:
    """The blocks that can be gathered by themselves: those that are there once, and share no weights with
    anything else."""
    names = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    uses: Counter[nn.Parameter] = Counter(
        parameter for module in model.modules() for parameter in module.parameters(recurse=False)
    )
    return [
        block
        for _, block in find_blocks(model)
        if names[block] == 1
        and Counter(p for module in block.modules() for p in module.parameters(recurse=False)).items()
        <= uses.items()
    ]


def whole_parameters(model: nn.Module) -> list[str]:
    """Names of the parameters that FSDP can't shard: without dimensions or numbers, or of an odd dtype."""
    trained = [p for p in parameters_of(model) if p.requires_grad]
    usual = Counter(p.dtype for p in trained).most_common(1)[0][0]
    return [
        name
        for name, p in model.named_parameters()
        if not p.ndim or not p.numel() or (p.requires_grad and p.dtype != usual)
    ]


def refuse_unwritable(model: nn.Module, whole: Sequence[str]) -> None:
    """Refuse to split what no file of a checkpoint can hold parts of.

    :param whole: names of parameters that are not split.
    :raises DoesNotFit: naming one.
    """
    for name, parameter in model.named_parameters():
        if parameter.dtype == torch.complex128 and name not in whole:
            raise DoesNotFit(
                f"parameter {name!r} is complex128, of which no file of a checkpoint can hold parts; use a "
                "technique that keeps parameters whole, such as ddp or spill, or have its real and imaginary "
                "parts as two parameters"
            )


class Sharded(Parallel):
    """A model made by ``fully_shard``.

    :param module: the root, with ``fully_shard`` applied.
    :param units: those of its blocks that are gathered by themselves, in the order of their computation.
    :param whole: names of parameters that are not sharded; their gradients are averaged here.
    """

    def __init__(
        self,
        model: nn.Module,
        ranks: Ranks,
        module: nn.Module,
        units: Sequence[nn.Module] = (),
        whole: Sequence[str] = (),
    ) -> None:
        kernels: Kernels = "two kinds" if whole else "fused shards"
        super().__init__(
            model,
            ranks,
            module,
            share=ranks.rank,
            shares=ranks.size,
            optimizer_kernels=kernels,
        )
        assert isinstance(module, FSDPModule)
        # What took part on some ranks alone is reduced by all: one that left it out would be waited for.
        module.set_reduce_scatter_unused_params(True)
        self._whole = [p for name, p in self.trainable().items() if name in set(whole)]
        self._name_of = {p: name for name, p in self.trainable().items()}
        self._have_gradient: set[str] = set()
        self._had_gradient: set[str] | None = None
        self._reduced = 0
        self._in_backward = False
        self._fix = FIX if units else "use another technique"
        self._gathers = NarrowGathers(units, ranks)
        self._calls = _CallsInOrder(module, units, self._gathers.begin)
        names = [name for name, part in module.named_modules() if isinstance(part, FSDPModule)]
        codes = [name or "what is outside of the blocks" for name in names]
        descriptions = [f"block {name!r}" if name else "the model" for name in names]
        fixes = dict.fromkeys([f"{code}{what}" for code in codes for what in ("", " (backward)")], FIX)
        norms = self._whole_batch
        self._agreement = Agreement(fixes | (norms.fixes if norms else {}), ranks)
        if norms:
            norms.agreement = self._agreement
        for name, code, what in zip(names, codes, descriptions, strict=True):
            self._watch(module.get_submodule(name), code, what)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs of the model, which sees no other rank; FSDP names its group."""
        with without_group():
            return super().call(*args, **kwargs)

    def missing_gradients(self) -> int:
        """Those of this rank alone, as FSDP was about to reduce them."""
        self._have_gradient |= {self._name_of[p] for p in self._whole if p.grad is not None}
        return len(self._name_of) - len(self._have_gradient)

    def finish_gradients(self) -> None:
        """Average the gradients of what is not sharded, and remove the zeros of those that no rank
        computed."""
        for parameter in self._whole:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= self.shares
        if self.gradients_missing:
            forget_missing(self.trainable(), self._have_gradient, self.ranks)
        self._have_gradient = set()
        self._gathers.agree()

    def evaluate(self, objective: Objective, batch: Any, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As on one device; every rank calls this together, with or without samples of its own.

        :raises DoesNotFit: when ranks gather different units.
        """
        with self._translated_errors():
            parts = super().evaluate(objective, batch, samples)
        self._agreement.note(NOTHING_MORE)
        return parts

    def finish_evaluating(self) -> None:
        """Give the gathered parameters back, which would stay until a backward pass."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def run_backward(self, loss: torch.Tensor, samples: int, last: bool) -> None:
        """Run the backward pass; every rank calls this together.

        :raises DoesNotFit: when ranks reduce different units, or FSDP did not hear of the backward pass.
        """
        self._had_gradient = None if samples else self._with_gradient()
        self._reduced = 0
        self._in_backward = True
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        finally:
            self._in_backward = False
        self._agreement.note(NOTHING_MORE)
        if not self._reduced:
            raise DoesNotFit(
                "no gradient reached the model's outputs, which FSDP only finds in tensors, tuples, lists, "
                "dictionaries and dataclasses that torch knows; return one of these"
            )

    @contextmanager
    def _gradient_sync(self, last: bool) -> Iterator[None]:
        assert isinstance(self.module, FSDPModule)
        self.module.set_requires_gradient_sync(last)
        with self._translated_errors():
            yield

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, JobError) as error:
            if isinstance(error, NotImplementedError) and "'Sparse" in str(error):
                raise DoesNotFit(
                    "a parameter gets sparse gradients, which FSDP can't exchange; "
                    "use sparse=False, or another technique"
                ) from error
            for words, meaning in _MEANINGS.items():
                if words in str(error):
                    raise DoesNotFit(f"{meaning}; {self._fix}") from error
            raise

    def _watch(self, unit: nn.Module, name: str, what: str) -> None:
        """Compare among ranks when ``unit`` is exchanged, and note which gradients there are."""
        assert isinstance(unit, FSDPModule)
        unit.set_custom_all_gather(_Gather(functools.partial(self._agreement.note, name)))
        unit.set_custom_reduce_scatter(_Reduce(functools.partial(self._agreement.note, f"{name} (backward)")))
        # FSDP has no hooks for these two moments, so its own methods are wrapped.
        for group in unit._get_fsdp_state()._fsdp_param_groups:
            group.pre_backward = functools.partial(self._pre_backward, what, group.pre_backward)  # type: ignore[method-assign]
            group.post_backward = functools.partial(self._post_backward, group, group.post_backward)  # type: ignore[method-assign]
        unit.register_forward_hook(_unpack_objects, prepend=True)
        unit.register_forward_hook(functools.partial(_check_output, what))
        unit.register_forward_hook(_repack_objects)

    def _pre_backward(self, what: str, then: Callable[..., None], *unused: Any) -> None:
        if not self._in_backward:
            raise DoesNotFit(
                f"the model or its loss computes gradients within the forward pass, through {what}, whose "
                f"weights FSDP frees after a backward pass; {self._fix}"
            )
        then(*unused)

    def _post_backward(self, group: Any, then: Callable[..., None], *unused: Any) -> None:
        for parameter in group.fsdp_params:
            if (name := self._name_of.get(parameter.sharded_param)) is None or not _has_gradient(parameter):
                continue
            if self._had_gradient is None or name in self._had_gradient:
                self._have_gradient.add(name)
            elif not group.reduce_grads:
                # A sample that counts as nothing gave it; nobody has asked for it.
                parameter.unsharded_param.grad = None
        self._reduced += 1
        self._gathers.before_reduction(group)
        then(*unused)

    def _with_gradient(self) -> set[str]:
        assert isinstance(self.module, nn.Module)
        return {
            self._name_of[parameter.sharded_param]
            for part in self.module.modules()
            if isinstance(part, FSDPModule)
            for group in part._get_fsdp_state()._fsdp_param_groups
            for parameter in group.fsdp_params
            if parameter.sharded_param in self._name_of and _has_gradient(parameter)
        }


def _check_output(what: str, unit: nn.Module, args: Any, output: Any) -> None:
    """Refuse an output of which FSDP finds no tensor: it would not hear of the backward pass.

    Without this, weights that are freed by then would be found missing there, and something else blamed.

    :raises DoesNotFit: for an object that holds all there are, and for weights that are given back by now.
    """
    leaves = _pytree.tree_leaves(output)
    if any(isinstance(leaf, torch.Tensor) and leaf.numel() and _is_freed(leaf) for leaf in leaves):
        raise DoesNotFit(
            f"the forward pass of {what} returns one of its weights, which FSDP has given back by then; "
            "return a copy (weight.clone()), or use another technique"
        )
    if collect_grad_tensors(output):
        return
    for leaf in leaves:
        held = vars(leaf) if hasattr(leaf, "__dict__") and not isinstance(leaf, torch.Tensor) else {}
        if any(tensor.requires_grad for tensor in tensors_in(held)):
            raise DoesNotFit(
                f"the forward pass of {what} returns tensors in a {type(leaf).__name__}, where FSDP does not "
                "find them; return a tensor, tuple, list or dictionary"
            )


class _Packing:
    """How an output is put together again from what :func:`_unpack_objects` made of it."""

    def __init__(self, structure: Any, objects: dict[int, Any]) -> None:
        self.structure = structure
        self.objects = objects


def _unpack_objects(unit: nn.Module, args: Any, output: Any) -> Any:
    """An output with dictionaries in the place of objects that hold tensors, which FSDP looks into."""
    leaves, structure = _pytree.tree_flatten(output)
    objects = {i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)}
    objects = {i: leaf for i, leaf in objects.items() if hasattr(leaf, "__dict__") and _holds_tensors(leaf)}
    if not objects:
        return output
    unpacked = [vars(leaf) if place in objects else leaf for place, leaf in enumerate(leaves)]
    return unpacked, _Packing(structure, objects)


def _repack_objects(unit: nn.Module, args: Any, output: Any) -> Any:
    """The output that was opened, with the tensors that FSDP has made of its own."""
    if not (isinstance(output, tuple) and output and isinstance(output[-1], _Packing)):
        return output
    leaves, packing = output
    for place, given in packing.objects.items():
        repacked = copy.copy(given)
        vars(repacked).update(leaves[place])
        leaves[place] = repacked
    return _pytree.tree_unflatten(leaves, packing.structure)


def _holds_tensors(value: Any) -> bool:
    leaves = _pytree.tree_leaves(vars(value))
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)


def _is_freed(tensor: torch.Tensor) -> bool:
    try:
        return tensor.layout == torch.strided and tensor.untyped_storage().size() == 0
    except (NotImplementedError, RuntimeError):  # torch.func's tensors have none of their own
        return False


def _has_gradient(parameter: Any) -> bool:
    if parameter.unsharded_accumulated_grad is not None:
        return True
    return hasattr(parameter, "_unsharded_param") and parameter.unsharded_param.grad is not None


class _CallsInOrder:
    """Sees to it that each forward of ``root`` calls each of ``units`` in order, once or several times.

    :param begin: called before each.
    """

    def __init__(self, root: nn.Module, units: Sequence[nn.Module], begin: Callable[[], None]) -> None:
        self._units = units
        self._at_begin = begin
        self._next = 0
        self._running = False
        if units:
            root.register_forward_pre_hook(self._before_pass, prepend=True)
            root.register_forward_hook(self._after_pass, prepend=True)
        for index, unit in enumerate(units):
            unit.register_forward_pre_hook(
                functools.partial(self._before_unit, index), prepend=True, with_kwargs=True
            )

    def _before_pass(self, *unused: Any) -> None:
        self._next, self._running = 0, True
        self._at_begin()

    def _before_unit(self, index: int, unit: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self._running:  # in the backward pass, where activations are computed again
            return None
        ahead: Sequence[int] = range(self._next, index)
        if index < self._next:
            # The model goes through its blocks once more: ranks that skip some still call all in one order.
            ahead = [*range(self._next, len(self._units)), *range(index)]
        passed = self._pass_through(ahead, (args, kwargs))
        self._next = index + 1
        return passed

    def _after_pass(self, root: nn.Module, args: Any, output: Any) -> Any:
        output = self._pass_through(range(self._next, len(self._units)), output)
        self._running = False
        return output

    def _pass_through(self, indices: Sequence[int], values: Any) -> Any:
        """``values`` after having gone through units that leave them as they are."""
        if not indices:
            return values
        leaves, structure = _pytree.tree_flatten(values)
        through = [i for i, leaf in enumerate(leaves) if _is_floating(leaf) and leaf.requires_grad]
        through = through or [i for i, leaf in enumerate(leaves) if _is_floating(leaf)]
        if not through:
            raise DoesNotFit(f"the model passes over a block where no floating-point tensor is; {FIX}")
        for index in indices:
            passed = self._call_as_identity(self._units[index], [leaves[i] for i in through])
            for i, tensor in zip(through, passed, strict=True):
                # FSDP marks the tensors that it is given; the one after this unit gets others.
                leaves[i] = tensor.view_as(tensor)
        return _pytree.tree_unflatten(leaves, structure)

    def _call_as_identity(self, unit: nn.Module, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        own = unit.__dict__.get("forward")

        def identity(*tensors: torch.Tensor) -> Any:
            return _Identity.apply(len(tensors), *tensors, *parameters_of(unit))  # type: ignore[no-untyped-call]

        self._running, unit.forward = False, identity
        try:
            passed: tuple[torch.Tensor, ...] = unit(*tensors)
        finally:
            self._running = True
            if own is None:
                del unit.forward
            else:
                unit.forward = own
        return passed


class _Identity(torch.autograd.Function):
    """The tensors as they are; what needs gradients after them is what would if the unit were computed."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.parameters = len(tensors) - count
        return tuple(tensor.view_as(tensor) for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return (None, *gradients, *(None for _ in range(ctx.parameters)))


class _Noted:
    """An exchange that is noted before it begins."""

    def __init__(self, note: Callable[[], None]) -> None:
        super().__init__()
        self._note = note

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._note()
        return super().__call__(*args, **kwargs)  # type: ignore[misc]


class _Gather(_Noted, DefaultAllGather):
    """A gather of a unit's weights that is noted."""


class _Reduce(_Noted, DefaultReduceScatter):
    """A reduction of a unit's gradients that is noted."""


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
