"""What functions of a job's code keep: attributes, what they close over, defaults, given arguments."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import nn

from saturn_airflow.training.optim import own_classes

Put = Callable[[Any], object]

#: What may keep something beside what it is called with.
FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)


class ValuePlace(NamedTuple):
    """Where a value is, and how to have another there."""

    value: Any
    put: Put


def cannot(value: Any) -> None:
    """Put nothing anywhere: what is there changes inside only."""


def parts_of(function: Any) -> Iterator[tuple[str, Any, Put]]:
    """What one of :data:`FUNCTIONS` keeps: a step of its path, the value, and how to have another there."""
    if isinstance(function, types.MethodType):
        yield "[self]", function.__self__, cannot
        yield "[function]", function.__func__, cannot
    elif isinstance(function, functools.partial):
        yield "[function]", function.func, cannot
        yield "[arguments]", [*function.args, *function.keywords.values()], cannot
    else:
        for number, cell in enumerate(function.__closure__ or ()):
            with_contents = [cell.cell_contents] if _is_filled(cell) else []
            for contents in with_contents:
                yield f"[closure {number}]", contents, functools.partial(setattr, cell, "cell_contents")
        if own_classes.is_own(function.__module__):
            yield (
                "[defaults]",
                [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()],
                cannot,
            )
            for name, value in list(vars(function).items()):
                yield f".{name}", value, functools.partial(setattr, function, name)


def places_in(path: str, function: Any, visited: set[int]) -> Iterator[tuple[str, ValuePlace]]:
    """A function of the job's own, what it keeps, and what functions that it keeps do, by where it is.

    :param visited: whose places are known already, by id; modules among them are left out.
    """
    if id(function) in visited or not is_own(function):
        return
    visited.add(id(function))
    yield path, ValuePlace(function, cannot)
    waiting = list(parts_of(function))
    while waiting:
        step, value, put = waiting.pop(0)
        if step in ("[defaults]", "[arguments]"):
            waiting += [(f"{step}[{number}]", part, cannot) for number, part in enumerate(value)]
        elif isinstance(value, FUNCTIONS):
            yield from places_in(path + step, value, visited)
        elif not (isinstance(value, nn.Module) and id(value) in visited):
            yield path + step, ValuePlace(value, put)


def is_own(function: Any) -> bool:
    """Whether one of :data:`FUNCTIONS` is of the job's own code, or has state of it."""
    if isinstance(function, types.FunctionType):
        return own_classes.is_own(function.__module__)
    if isinstance(function, functools.partial):
        return not isinstance(function.func, FUNCTIONS) or is_own(function.func)
    return own_classes.is_own(type(function.__self__).__module__)


def names_in(code: types.CodeType) -> set[str]:
    """The names of globals and attributes that a function's code has, and that of functions in it."""
    inner = (part for part in code.co_consts if isinstance(part, types.CodeType))
    return set(code.co_names).union(*map(names_in, inner))


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
