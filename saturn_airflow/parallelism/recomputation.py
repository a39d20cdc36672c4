"""Computing a block again in the backward pass, instead of keeping what it computed (Chen et al., 2016).

The second time, the block has the buffers, attributes, modes and random numbers it had the first time, and
what it does to them is undone: it is as if it had been computed once. What can't be seen from outside, such
as an object of one's own that the block writes into, is found out by computing the block's first calls twice
at once: where the second result is another one, the block is refused. So it is where the result is another
one by the backward pass, since what it reads elsewhere has changed meanwhile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from saturn_airflow.launch import job_log
from saturn_airflow.launch.failures import is_out_of_memory
from saturn_airflow.launch.request import DoesNotFit
from saturn_airflow.parallelism.module_state import ModuleState, copied, parameters_of
from saturn_airflow.training.nested import tensors_in
from saturn_airflow.training.optim.plain_values import equal_tensors
from saturn_airflow.training.without_group import without_group

Compute = Callable[..., Any]
Versions = Sequence[tuple[torch.Tensor, int]]

#: Calls of each block that are computed twice at once, to see that nothing comes out differently, and of
#: which the result in the backward pass is compared, too.
checked_calls = 2
_begun = 0
# How far two results may be apart on a GPU, in roundings of the largest number: sums may be in any order.
_ROUNDINGS = {torch.float64: 1e4, torch.float32: 1e3}
_ROUNDINGS_OF_OTHERS = 8.0


def compare_anew() -> None:
    """Compare the next calls of all blocks in the backward pass once more: what was compared without random
    numbers may draw other ones."""
    global _begun
    _begun += 1


def recomputed(name: str, block: nn.Module, compute: Compute) -> Compute:
    """``compute``, the forward pass of ``block``, of which only the inputs are kept.

    :param name: of the block, for messages.
    :returns: a function that raises DoesNotFit when the block is computed otherwise the second time, or its
        inputs are changed in place in the meantime.
    """
    modules = list(block.modules())
    if any(isinstance(module, torch.jit.ScriptModule) for module in modules):
        raise DoesNotFit(f"block {name!r} is compiled by TorchScript, and can't be computed twice the same")
    calls, compared, begun = 0, 0, _begun

    @functools.wraps(compute)
    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls, compared, begun
        if not torch.is_grad_enabled():
            return compute(*args, **kwargs)
        if begun != _begun:
            compared, begun = 0, _begun
        call = Call(name, block, modules, compute, args, kwargs)
        compares = compared < checked_calls
        # What is compared has to be computed to its end.
        with set_checkpoint_early_stop(False) if compares else nullcontext():
            result = checkpoint(call, use_reentrant=False, preserve_rng_state=False)
        if calls < checked_calls:
            calls += 1
            call.check(result)
        if compares:
            compared += 1
            call.compare_later(result)
        return result

    return forward


class Call:
    """One call of a block, which can be repeated."""

    def __init__(
        self,
        name: str,
        block: nn.Module,
        modules: Sequence[nn.Module],
        compute: Compute,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self._name = name
        self._compute = compute
        self._first = (args, kwargs)
        # The block may append to a list that it is handed.
        self._inputs = copied((args, kwargs), {}, tensors=False)
        self._input_versions = _versions(tensors_in(self._inputs))
        self._weight_versions = _versions(parameters_of(block))
        self._asking = [(parameter, parameter.requires_grad) for parameter in parameters_of(block)]
        self._state = ModuleState(modules)
        self._computed = False
        self._result: Versions | None = None

    def __call__(self) -> Any:
        if not self._computed:
            self._computed = True
            args, kwargs = self._first
            del self._first
            result = self._compute(*args, **kwargs)
            self._check_unchanged("an input", self._input_versions)
            self._check_unchanged("a weight", self._weight_versions)
            return result
        self._check_unchanged("an input", self._input_versions)
        result = self.again()
        self._compare(result)
        return result

    def again(self) -> Any:
        """Compute the block as it was when this was made; nothing of it is changed by that."""
        args, kwargs = copied(self._inputs, {}, tensors=False)
        with self._state.put_back(), self._asked_as_then(), job_log.muted(), without_group():
            return self._compute(*args, **kwargs)

    def check(self, first: Any) -> None:
        """Compute the block again at once, and see that it comes out as ``first``.

        :raises DoesNotFit: when it does not.
        """
        try:
            second = self()
        except DoesNotFit:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise self._differs(f"the second time it raises {type(error).__name__}: {error}") from error
        mine, other = list(tensors_in(first)), list(tensors_in(second))
        if len(mine) != len(other) or not all(map(_agree, mine, other)):
            raise self._differs("the second result is another one")

    def compare_later(self, first: Any) -> None:
        """See in the backward pass that the block comes out as ``first`` by then."""
        self._result = _versions(tensor.detach() for tensor in tensors_in(first))

    def _compare(self, second: Any) -> None:
        if self._result is None:
            return
        firsts, others = self._result, list(tensors_in(second))
        self._result = None
        # What was written into since is not what the block returned.
        if len(firsts) != len(others) or any(
            _version(tensor) == version and not _agree(tensor, other)
            for (tensor, version), other in zip(firsts, others, strict=True)
        ):
            raise self._differs(
                "the result is another one by then: what it reads outside of itself has changed meanwhile"
            )

    @contextmanager
    def _asked_as_then(self) -> Iterator[None]:
        """Have the block's weights ask for gradients as they did the first time."""
        others = [(p, asked) for p, asked in self._asking if p.requires_grad != asked]
        for parameter, asked in others:
            parameter.requires_grad_(asked)
        try:
            yield
        finally:
            for parameter, asked in others:
                parameter.requires_grad_(not asked)

    def _check_unchanged(self, what: str, versions: Versions) -> None:
        if any(_version(tensor) != version for tensor, version in versions):
            raise DoesNotFit(
                f"{what} of block {self._name!r} is changed in place, so the block can't be computed again "
                "in the backward pass; change a copy of it"
            )

    def _differs(self, how: str) -> DoesNotFit:
        return DoesNotFit(
            f"block {self._name!r} can't be computed again in the backward pass, since {how}; keep what it "
            "remembers between calls in buffers or plain attributes, and draw random numbers from torch's, "
            "numpy's or Python's global generator"
        )


def _versions(tensors: Iterable[torch.Tensor]) -> Versions:
    return [(tensor, _version(tensor)) for tensor in tensors]


def _version(tensor: torch.Tensor) -> int:
    """How often a tensor was written into; those of inference mode don't count."""
    return 0 if tensor.is_inference() else tensor._version


def _agree(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    one, other = one.detach(), other.detach()
    if one.device.type == "cpu" or not one.is_floating_point():
        return equal_tensors(one, other)
    roundings = _ROUNDINGS.get(one.dtype, _ROUNDINGS_OF_OTHERS)
    largest = float(one.abs().nan_to_num().max()) if one.numel() else 0.0
    return torch.allclose(
        one, other, rtol=0.0, atol=roundings * torch.finfo(one.dtype).eps * largest, equal_nan=True
    )
