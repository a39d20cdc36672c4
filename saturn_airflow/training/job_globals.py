"""What training changes beside the model in a job's own code, such as a counter that its loss advances.

Global variables, attributes of classes, and what functions keep: attributes, what they close over, defaults.
"""

from __future__ import annotations

import hashlib
import json
import sys
import types
from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import nn

from saturn_airflow.model.errors import JobError
from saturn_airflow.model.jobs import Job
from saturn_airflow.training import of_all_ranks
from saturn_airflow.training.functions import FUNCTIONS, ValuePlace, cannot, places_in
from saturn_airflow.training.guarding.users_state import functions_of
from saturn_airflow.training.model_attributes import is_plain, seen
from saturn_airflow.training.optim import own_classes, plain_values
from saturn_airflow.training.used_modules import python_modules

#: By a Python module's name, values by the variable's, by ``Class.attribute``, or by where a function keeps
#: them; under ``""`` what functions keep that are attributes of the model.
Globals = dict[str, dict[str, Any]]


class JobGlobals:
    """The global variables of the Python modules that a job's model, loss and optimizer are in.

    :param model: as this rank trains it, before its first step.
    :param functions: what else is called and may keep something, by name: functions, and classes whose
        methods are called.
    """

    def __init__(
        self, job: Job, model: nn.Module, functions: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        self._functions = functions
        self._names = sorted(python_modules(job, model))
        self._model = model
        self._before: Globals = {}
        self._given: dict[tuple[str, str], str] = {}
        given = {where: place.value for where, place in self._places()}
        self._given = {where: _summary(value) for where, value in given.items()}
        self._modules = {where for where, value in given.items() if isinstance(value, nn.Module)}

    def values(self) -> tuple[Globals, dict[str, str]]:
        """What has changed, JSON-ready, and why what else has changed can't be kept, by its name."""
        found: Globals = {}
        why_not: dict[str, str] = {}
        for (module, name), value in self._changed():
            if isinstance(value, nn.Module) and (module, name) not in self._modules:
                kind = type(value).__name__
                why_not[_called(module, name)] = (
                    f"training makes this {kind}; make it where the file is imported"
                )
                continue
            try:
                found.setdefault(module, {})[name] = plain_values.encode(value, "it")
            except JobError as error:
                why_not[_called(module, name)] = str(error)
        return {module: own for module, own in found.items() if own}, why_not

    def changed(self) -> Iterator[tuple[str, Any]]:
        """What has changed, as it is there, by its name."""
        return ((_called(*where), value) for where, value in self._changed())

    def set(self, values: Mapping[str, Mapping[str, Any]]) -> None:
        """Continue with what :meth:`values` told."""
        _put(dict(self._everything()), values)
        self._before = self.values()[0]

    def noted(self, values: Globals) -> Globals:
        """What :meth:`values` told, for :func:`of_all_ranks.merged`."""
        return of_all_ranks.noted(values, self._before)

    def place(self, name: str) -> ValuePlace | None:
        """Where what :meth:`values` calls so is."""
        return next((place for where, place in self._places() if _called(*where) == name), None)

    def _changed(self) -> Iterator[tuple[tuple[str, str], Any]]:
        for where, (value, _) in self._places():
            if self._given.get(where) != _summary(value):
                yield where, value

    def _places(self) -> Iterator[tuple[tuple[str, str], ValuePlace]]:
        """Where there may be state of the job's."""
        for where, place in self._everything():
            # What was state once, and has become too large to be told from data, is state still.
            if where in self._given or _may_be_state(place.value):
                yield where, place

    def _everything(self) -> Iterator[tuple[tuple[str, str], ValuePlace]]:
        visited = set(map(id, self._model.modules()))
        for (module, name), place in self._variables():
            for path, inner in _with_inner(name, place, visited):
                yield (module, path), inner

    def _variables(self) -> Iterator[tuple[tuple[str, str], ValuePlace]]:
        for module in self._names:
            for name, value in list(vars(sys.modules[module]).items()):
                if isinstance(value, type) and value.__module__ == module:
                    yield from _of_class(module, name, value)
                elif not name.startswith("__"):
                    yield (module, name), ValuePlace(value, partial(setattr, sys.modules[module], name))
        for name, function in (*functions_of(self._model), *self._functions.items()):
            if isinstance(function, type):
                yield from _of_class("", name, function)
            else:
                yield ("", name), ValuePlace(function, cannot)


def _of_class(module: str, name: str, kind: type) -> Iterator[tuple[tuple[str, str], ValuePlace]]:
    for key, part in list(vars(kind).items()):
        part = getattr(part, "__func__", part)
        if not key.startswith("_") or isinstance(part, FUNCTIONS):
            yield (module, f"{name}.{key}"), ValuePlace(part, partial(setattr, kind, key))


def put_into_functions(model: nn.Module, values: Mapping[str, Any]) -> None:
    """Have the functions that are attributes of ``model`` keep what :class:`JobGlobals` told of another's."""
    visited = set(map(id, model.modules()))
    places = {
        ("", name): place
        for path, one in functions_of(model)
        for name, place in _with_inner(path, ValuePlace(one, cannot), visited)
    }
    _put(places, {"": values})


def _with_inner(path: str, place: ValuePlace, visited: set[int]) -> Iterator[tuple[str, ValuePlace]]:
    """What is at ``path``; if it is a function, with what it keeps."""
    if isinstance(place.value, FUNCTIONS):
        yield from places_in(path, place.value, visited)
    else:
        yield path, place


def _put(places: Mapping[tuple[str, str], ValuePlace], values: Mapping[str, Mapping[str, Any]]) -> None:
    for module, own in values.items():
        for name, value in own.items():
            place = places.get((module, name)) or _attribute(places, module, name)
            if place is not None:
                place.put(plain_values.restored(place.value, value))


def _called(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name


def _attribute(places: Mapping[tuple[str, str], ValuePlace], module: str, name: str) -> ValuePlace | None:
    """A variable, or an attribute of a class or function, which need not be there yet."""
    path, _, last = name.rpartition(".")
    if (module, path) in places:
        holder = places[module, path].value
    else:
        holder = sys.modules.get(module)
        for part in path.split(".") if path else ():
            holder = getattr(holder, part, None)
    known = holder is not None and "[" not in last and hasattr(holder, "__dict__")
    return ValuePlace(vars(holder).get(last), partial(setattr, holder, last)) if known else None


def _may_be_state(value: Any) -> bool:
    if isinstance(value, nn.Module | Iterator):
        return True
    if isinstance(value, type | types.ModuleType | types.FunctionType | property):
        return False
    return is_plain(value, objects=True) or own_classes.fields_of(value) is not None


def _summary(value: Any) -> str:
    """What is another if ``value`` has changed."""
    try:
        encoded = plain_values.encode(value, "it")
    except JobError:
        encoded = repr(seen(value, {}))
    return hashlib.sha1(json.dumps(encoded, sort_keys=True).encode()).hexdigest()
