"""What a job's code remembers of single samples, as temporal ensembling does: each rank would know a part.

A sample's outputs hardly change between two of the guard's steps, so losses need not show that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from saturn_airflow.parallelism.module_state import ModuleState
from saturn_airflow.training.functions import FUNCTIONS
from saturn_airflow.training.guarding.samples import Samples
from saturn_airflow.training.guarding.users_state import UsersState
from saturn_airflow.training.job_globals import JobGlobals
from saturn_airflow.training.model_attributes import ModelAttributes, name_of
from saturn_airflow.training.optim import own_classes

#: By where something is remembered, how many rows a table has there (-1 of a mapping or set), and of what
#: there is something: keys, or numbers of rows that are not all 0.
Keys = dict[str, tuple[int, list[str]]]
Gradients = Callable[[], tuple[float, Samples]]

_MOST = 2**16  # keys or rows of a place
_LOOKED_AT, _DEEP = 64, 8  # items of a container, and containers within each other


class KnownSamples:
    """Mappings, sets and tables in a model's attributes and in the job's code that training changes.

    :param attributes: of the model, as they were before the first step; so were
    :param variables: of the job's code.
    """

    def __init__(self, model: nn.Module, attributes: ModelAttributes, variables: JobGlobals) -> None:
        self._model = model
        self._attributes = attributes
        self._variables = variables

    def keys(self) -> Keys:
        """Of what there is something by now."""
        return {name: found for name, place in self._places() if (found := _keys(place)) is not None}

    def matters(self, name: str, users: Callable[[], UsersState], gradients: Gradients) -> bool:
        """Whether ``gradients`` of a batch are others where nothing is at ``name``: without a cache they are
        not."""
        found = []
        for empty in (False, True):
            state = ModuleState(self._model.modules())
            with users().put_back(), state.put_back(), self._emptied(name if empty else ""):
                try:
                    found.append(gradients())
                except Exception:  # it has to be there
                    return True
        (loss, with_it), (other_loss, without_it) = found
        return loss != other_loss or any(
            one is not None and (other is None or one.distance(other) > 0)
            for one, other in ((one, without_it.get(key)) for key, one in with_it.items())
        )

    @contextmanager
    def _emptied(self, name: str) -> Iterator[None]:
        """Nothing is at ``name`` inside; afterwards all is as it was."""
        place: Any = dict(self._places()).get(name)
        then: Any = None
        if isinstance(place, torch.Tensor):
            place = place.detach()
            then = place.clone()
            place.zero_()
        elif place is not None:
            then = place.copy()
            place.clear()
        try:
            yield
        finally:
            if isinstance(place, torch.Tensor):
                place.copy_(then)
            elif place is not None:
                place.clear()
                place.update(then)

    def _places(self) -> Iterator[tuple[str, Any]]:
        modules = dict(self._model.named_modules())
        for prefix, own in self._attributes.values()[0].items():
            for key in own:
                yield from _inside(name_of(prefix, key), vars(modules[prefix]).get(key), _DEEP)
        for name, value in self._variables.changed():
            yield from _inside(name, value, _DEEP)


def lacking(expected: Keys, here: Keys) -> list[str]:
    """Where something is remembered on one device of what it is not here."""
    return [
        name
        for name, (rows, keys) in expected.items()
        if name not in here or (here[name][0] == rows and not set(keys) <= set(here[name][1]))
    ]


def _inside(name: str, value: Any, deep: int) -> Iterator[tuple[str, Any]]:
    """The mappings, sets and tensors that ``value`` is or holds, by where they are; what a mapping has of a
    sample is no table."""
    if isinstance(value, torch.Tensor | dict | set):
        yield name, value
    if isinstance(value, FUNCTIONS) or not deep:
        return
    parts: Mapping[Any, Any] = own_classes.fields_of(value) or {}
    if isinstance(value, Mapping):
        parts = value
    elif isinstance(value, list | tuple):
        parts = dict(enumerate(value))
    for key, part in list(parts.items())[:_LOOKED_AT]:
        if not (isinstance(value, Mapping) and isinstance(part, torch.Tensor)):
            yield from _inside(f"{name}.{key}", part, deep - 1)


@functools.singledispatch
def _keys(place: Any) -> tuple[int, list[str]] | None:
    """Of what there is something in a mapping or set; None where its keys can't be told apart."""
    plain = all(isinstance(key, str | bytes | int | float | tuple) for key in place)
    return (-1, sorted(map(repr, place))) if len(place) <= _MOST and plain else None


@_keys.register
def _(place: torch.Tensor) -> tuple[int, list[str]] | None:
    """The rows of a table; None of what is none."""
    if not place.is_floating_point() or not place.ndim or not 1 < len(place) <= _MOST:
        return None
    rows = place.detach().reshape(len(place), -1).ne(0).any(1)
    return len(place), list(map(str, rows.nonzero().flatten().tolist()))
