"""Steps of an optimizer that is only tried: the first ones, and some as it takes them after thousands.

Optimizers do something else after a while, such as clipping once a warm-up is over.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch

# What counters of steps are set ahead by, and how many steps are taken then.
_LATER = 10_000
_STEPS_LATER = 2

Holder = MutableMapping[Any, Any]


def take(optimizer: torch.optim.Optimizer, steps: int, give_gradients: Callable[[int], None]) -> None:
    """Take some ``steps``, have all that counted them count thousands more, and take a few further ones.

    One that can't go on from so many, as it knows how many there are to be, has taken the first ones.

    :param give_gradients: gives the parameters their gradients for a step, of which the first is 0.
    """
    counted: dict[Any, float] = {}
    for step in range(steps):
        counted = {where: float(value) for where, _, value in _numbers(optimizer)}
        give_gradients(step)
        optimizer.step()
    _advance(optimizer, counted)
    with contextlib.suppress(Exception):
        for step in range(steps, steps + _STEPS_LATER):
            give_gradients(step)
            optimizer.step()


def _advance(optimizer: torch.optim.Optimizer, before: dict[Any, float]) -> None:
    """Have numbers that the last step made larger by 1 be larger by thousands."""
    for where, holder, value in list(_numbers(optimizer)):
        if float(value) - before.get(where, float(value)) == 1.0:
            if isinstance(value, torch.Tensor):
                value.add_(_LATER)
            else:
                holder[where[1]] = value + _LATER


def _numbers(optimizer: torch.optim.Optimizer) -> Iterator[tuple[tuple[int, Any], Holder, Any]]:
    """The numbers that an optimizer keeps, each with where it is."""
    of_parameters = (one for one in optimizer.state.values() if isinstance(one, MutableMapping))
    # The state itself: optimizers keep numbers of no parameter in particular there, too.
    holders: list[Holder] = [*of_parameters, *optimizer.param_groups, vars(optimizer), optimizer.state]
    for number, holder in enumerate(holders):
        for key, value in holder.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number or (type(value) is torch.Tensor and value.ndim == 0 and not value.is_complex()):
                yield (number, key), holder, value
