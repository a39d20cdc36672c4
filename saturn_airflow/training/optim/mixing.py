"""Whether an optimizer updates each parameter by itself, so that a rank need not hold all of them.

Adam and SGD do. Prodigy and D-Adaptation follow a step size from all parameters, others clip by the norm of
all gradients: on a rank that holds some of the parameters, such an optimizer makes other steps than on one
that holds all. It is found by a few steps of small parameters together, and of each alone; of gradients of
usual size, and where all or some are so large, so small or no numbers that what clips or skips rarely does.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from saturn_airflow.launch.request import DoesNotFit
from saturn_airflow.training.optim import tried_steps

_LONGEST = 8  # elements along a dimension of the small parameters
_SCALES = (1.0, 100.0, 1e-2, 10.0)  # of the gradients: some clip only what is large
_STEPS = 12  # estimates of a step size take a few
_FEW_STEPS = 2  # where gradients are extreme
_RATE = 1.0  # what such optimizers are made for; at a small one their estimates would take long to move
_WITHIN = 1e-4  # rounding and more, relative to how far a parameter went
# What all gradients are multiplied by, and what half of them are, so that it shows in the others.
_OF_ALL, _OF_SOME = (1e8, 1e-8), (1e8, math.nan)
_FIX = "use another optimizer, or single, ddp or spill"

Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
Group = Mapping[str, Any]


@dataclass(frozen=True)
class _Small:
    """A small parameter: its group's options, its values, and a number of its own."""

    options: Mapping[str, Any]
    values: torch.Tensor
    number: int

    def gradient(self, step: int) -> torch.Tensor:
        """Much the same direction in every step; its size grows and shrinks otherwise than the others'."""
        shape = tuple(self.values.shape)
        size = _SCALES[(step + self.number) % len(_SCALES)]
        gradient = size * (_values(shape, 1000 + self.number) + 0.3 * _values(shape, 100 + step))
        return gradient.to(self.values.device)


def refuse_mixing(what: str, make: Make, groups: Sequence[Group], *, known: bool = False) -> None:
    """Refuse an optimizer whose update of a parameter depends on others, where a rank lacks some of them.

    :param what: names the optimizer.
    :param make: makes it from its groups.
    :param known: whether it is known never to do otherwise for gradients of other sizes.
    :raises DoesNotFit: when parameters go elsewhere together than each alone.
    """
    small = _small(groups)
    if not small:
        return
    for sparse in (False, True):
        trial = _TogetherTrial(make, small, sparse)
        try:
            mixes = trial.mixes([1.0] * len(small), _STEPS)
            break
        except Exception as error:
            why = error
    else:
        raise DoesNotFit(
            f"{what} can't be tried on small parameters ({why}), and no device has all parameters here; "
            f"{_FIX}"
        )
    for times in () if known else _extremes(len(small)):
        # Some raise at what is no number: they stop the job, and take no other steps.
        with contextlib.suppress(Exception):
            mixes = mixes or trial.mixes(times, _FEW_STEPS)
    if mixes:
        raise DoesNotFit(
            f"{what} updates a parameter otherwise together with others than alone, as optimizers do "
            "that use the norm of all gradients, one step size estimated from all, or random numbers, "
            f"and no device has all parameters here; {_FIX}"
        )


def _extremes(count: int) -> list[list[float]]:
    """What the gradients of each of ``count`` parameters are multiplied by, of one trial after the other."""
    of_all = [[times] * count for times in _OF_ALL]
    return of_all + [
        [times if number % 2 == half else 1.0 for number in range(count)]
        for times, half in itertools.product(_OF_SOME, (0, 1))
    ]


class _TogetherTrial:
    """Steps of small parameters together, beside those of each alone."""

    def __init__(self, make: Make, small: Sequence[_Small], sparse: bool) -> None:
        self._make = make
        self._small = small
        self._sparse = sparse
        self._alone: dict[tuple[int, float, int], torch.Tensor] = {}

    def mixes(self, times: Sequence[float], steps: int) -> bool:
        """Whether a parameter goes elsewhere together than alone; where some gradients are usual, of those.

        :param times: what the gradients of each are multiplied by.
        """
        together = _after_steps(self._make, self._small, times, self._sparse, steps)
        for number, (by, after) in enumerate(zip(times, together, strict=True)):
            if by == 1.0 or 1.0 not in times:
                alone = self._after_alone(number, by, steps)
                went = float((alone - self._small[number].values).abs().max())
                # Not "above": a NaN is neither.
                if not float((alone - after).abs().max()) <= _WITHIN * went:
                    return True
        return False

    def _after_alone(self, number: int, by: float, steps: int) -> torch.Tensor:
        key = number, by, steps
        if key not in self._alone:
            (self._alone[key],) = _after_steps(self._make, [self._small[number]], [by], self._sparse, steps)
        return self._alone[key]


def lacks_some(groups: Sequence[Group], here: Mapping[str, nn.Parameter]) -> bool:
    """Whether this rank lacks a parameter, or a part of one, that the whole model's ``groups`` name."""
    return any(name not in here or _is_split(here[name]) for group in groups for name in group["params"])


def _is_split(parameter: nn.Parameter) -> bool:
    return isinstance(parameter, DTensor) and any(p.is_shard() for p in parameter.placements)


def _small(groups: Sequence[Group]) -> list[_Small]:
    """Two small parameters for each kind of group."""
    kinds: dict[str, _Small] = {}
    for group in groups:
        options = {key: value for key, value in group.items() if key != "params"} | {"lr": _RATE}
        device = next((p.device for p in group["params"]), None)
        some = [p for p in group["params"] if p.numel()][:2]
        shapes = [tuple(min(size, _LONGEST) for size in p.shape) for p in some]
        for number, shape in enumerate([*shapes, *shapes][:2]):
            kinds.setdefault(
                f"{number} {options}", _Small(options, _values(shape, len(kinds)).to(device), len(kinds))
            )
    return sorted(kinds.values(), key=lambda small: repr(small.options))


def _after_steps(
    make: Make, small: Sequence[_Small], times: Sequence[float], sparse: bool, steps: int
) -> list[torch.Tensor]:
    """The values of small parameters after some steps of all of them together.

    :param times: what the gradients of each are multiplied by.
    """
    parameters = [nn.Parameter(one.values.clone()) for one in small]
    groups: list[dict[str, Any]] = []
    for one, parameter in zip(small, parameters, strict=True):
        if not groups or groups[-1]["of"] is not one.options:
            groups.append({"of": one.options, "params": []})
        groups[-1]["params"].append(parameter)
    optimizer = make([{**group.pop("of"), "params": group["params"]} for group in groups])

    def give(step: int) -> None:
        for one, parameter, by in zip(small, parameters, times, strict=True):
            gradient = by * one.gradient(step)
            parameter.grad = gradient.to_sparse(1) if sparse else gradient

    tried_steps.take(optimizer, steps, give)
    return [parameter.detach() for parameter in parameters]


def _values(shape: tuple[int, ...], number: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
