"""Whether a loss is no linear function of the means over a batch that it is made of, however they are taken.

A mean that is clamped shows in no step whose batches hold no outliers. So what is one number for the whole
batch is made larger and smaller where it is computed: the loss must follow as a line does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from saturn_airflow.launch import failures
from saturn_airflow.training.nested import tensors_in

# As shares of what the numbers are at first: powers of 2, by which products round nothing. Losses in float16
# need not reach the last.
_HALF, _SMALL = 2.0**-1, 2.0**-10
_LARGE = (2.0**7, 2.0**14)
# What makes a line of a line. Of products and quotients, those with what is no tensor.
_LINEAR = frozenset(
    {
        "__get__",
        "add",
        "sub",
        "rsub",
        "neg",
        "detach",
        "float",
        "double",
        "to",
        "clone",
        "backward",
        "setitem",
    }
)
_LINEAR_BY_NUMBERS = frozenset({"mul", "div", "true_divide"})
# These give what is there: one element of many, or the only one.
_TAKING = frozenset({"__getitem__", "select", "take", "gather", "squeeze", "reshape", "view"})

#: Computes the loss of one batch, or of another that holds fewer samples or others.
TakeLoss = Callable[[int], torch.Tensor]


def bends(loss: TakeLoss, put_back: Callable[[], AbstractContextManager[Any]]) -> bool:
    """Whether the loss bends; False where that can't be told.

    :param put_back: around each time the loss is taken; what it changes is to be as it was afterwards.
    """

    def take(batch: int, scale: float = 1.0, fixed: frozenset[int] = frozenset()) -> tuple[float, _Scaled]:
        scaled = _Scaled(scale, fixed)
        with put_back(), torch.enable_grad(), scaled:
            value = loss(batch)
        return float(value.detach()), scaled

    def at(scale: float, fixed: frozenset[int]) -> float:
        try:
            return take(0, scale, fixed)[0]
        except Exception as error:
            if failures.is_of_the_machine(error):
                raise
            return math.nan  # it fails on what it is not made for

    try:
        at_first, scaled = take(0)
        if not scaled.looked_into or not math.isfinite(at_first):
            return False
        others = take(1)[1].values
    except Exception as error:
        if failures.is_of_the_machine(error):
            raise
        return False
    if len(others) != len(scaled.values):  # the job goes through the samples one by one
        return False
    # What is the same for all batches is of the weights, as a penalty on them.
    same = (i for i, (a, b) in enumerate(zip(scaled.values, others, strict=True)) if a == b)
    fixed = scaled.differentiated.union(same)
    found = {scale: at(scale, fixed) for scale in (_SMALL, _HALF, *_LARGE)}
    if at(1.0, fixed) != at_first:  # it counts, or draws
        return False
    numbers = [abs(value) for i, value in enumerate(scaled.values) if i not in fixed]
    return _off_line(at_first, found, max(numbers, default=0.0), scaled.epsilon)


def _off_line(one: float, found: Mapping[float, float], most: float, epsilon: float) -> bool:
    """Whether what was found at some scale is off the line through ``one`` and what was at the smallest."""
    small = found[_SMALL]
    if small == one * _SMALL and found[_HALF] == one * _HALF:
        return any(math.isfinite(value) and value != one * scale for scale, value in found.items())
    slope = (one - small) / (1 - _SMALL)
    # Each is a sum of terms that may cancel out.
    allowed = max(1e-9, 200 * epsilon) * (abs(one) + abs(small) + most)
    off = (
        abs(small + slope * (scale - _SMALL) - value) / max(1.0, scale)
        for scale, value in found.items()
        if scale != _SMALL
    )
    return any(math.isfinite(each) and each > allowed for each in off)


class _Scaled(TorchFunctionMode):
    """Multiplies what is one number of a batch where it is computed, and not what follows from it.

    :param fixed: those that stay as they are, by when they are computed.
    :ivar values: what they were.
    :ivar epsilon: the spacing of numbers around 1 in the coarsest format of these and what is made of them.
    :ivar looked_into: whether more is made of one than a sum or a multiple.
    :ivar differentiated: those of which gradients are computed, by when they are: what goes on from there
        are the gradients of samples, as of the sum of what a model predicts for a gradient penalty.
    """

    def __init__(self, scale: float, fixed: frozenset[int]) -> None:
        super().__init__()
        self.values: list[float] = []
        self.epsilon = 0.0
        self.looked_into = False
        self.differentiated: frozenset[int] = frozenset()
        self._scale, self._fixed = scale, fixed
        # What is made of which numbers. The tensors are held, so that no other gets their ids.
        self._followed: dict[int, tuple[torch.Tensor, frozenset[int]]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = list(tensors_in((args, kwargs)))
        of = frozenset(i for tensor in given if (f := self._followed.get(id(tensor))) for i in f[1])
        result = func(*args, **kwargs)
        if func is torch.autograd.grad:
            self.differentiated |= of
        elif of:
            self._note(func, args, given)
            # What is written into a tensor goes on from there.
            for tensor in tensors_in(args[0] if func is torch.Tensor.__setitem__ else result):
                self._follow(tensor, of)
        elif (
            _is_one_number(result)
            and any(tensor.ndim > 0 for tensor in given)
            and getattr(func, "__name__", None) not in _TAKING
        ):
            self.values.append(float(result.detach()))
            if len(self.values) - 1 not in self._fixed and self._scale != 1:
                result = result * self._scale
            self._follow(result, frozenset({len(self.values) - 1}))
        return result

    def _follow(self, tensor: torch.Tensor, of: frozenset[int]) -> None:
        self._followed[id(tensor)] = tensor, of
        if tensor.is_floating_point():
            self.epsilon = max(self.epsilon, torch.finfo(tensor.dtype).eps)

    def _note(self, func: Any, args: Sequence[Any], given: Sequence[torch.Tensor]) -> None:
        name = (getattr(func, "__name__", None) or "").strip("_")
        name = name if name != "get" else "__get__"
        by_number = name in _LINEAR_BY_NUMBERS and len(given) == 1 and isinstance(args[0], torch.Tensor)
        self.looked_into |= name not in _LINEAR and not by_number


def _is_one_number(result: Any) -> bool:
    return (
        isinstance(result, torch.Tensor)
        and result.requires_grad
        and result.ndim == 0  # tensors of one element may be of the one token that an expert gets
        and result.is_floating_point()
        # Inside vmap it is one number of each sample.
        and not torch._C._functorch.is_functorch_wrapped_tensor(result)
    )
