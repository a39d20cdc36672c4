"""What the objects behind a job's data keep, such as the epoch by which a sampler shuffles.

Looked at are the dataset, the samplers, the collate function and the generator of a DataLoader, or an
iterable of batches, and what they hold: objects, containers, closures and random generators; and what the
job's own code among them names: global variables of Python modules, attributes of classes, defaults.
"""

from __future__ import annotations

import base64
import copy
import copyreg
import ctypes
import functools
import io
import itertools
import json
import operator
import types
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from saturn_airflow.model.errors import JobError
from saturn_airflow.training import functions, rng
from saturn_airflow.training.functions import Put, ValuePlace, cannot
from saturn_airflow.training.model_attributes import seen
from saturn_airflow.training.optim import own_classes, plain_values, random_generators

_LOOKED_INTO = 64  # items of a container; longer ones are looked at from outside
_MOST = 4096  # objects
_READ = 2**23  # numbers of an array by which it is known
_CONTAINERS = (list, tuple, deque, dict, set)
_CODE = (type, types.ModuleType, types.FunctionType)
# What nothing is put in the place of: open files, and numbers that processes share (multiprocessing.Value).
_FROM_OUTSIDE = (io.IOBase, ctypes._SimpleCData, ctypes.Array)
_ROOTS = ("dataset", "sampler", "batch_sampler", "collate_fn", "generator")


class DataState:
    """What of ``loader``, a DataLoader or an iterable of batches, changes while one goes through it."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._given = self.summaries()

    def changed(self, *, in_files: bool = True) -> bool:
        """Whether anything is not as it was at first.

        :param in_files: also where open files and iterators are read on next.
        """
        places = self._places()
        return not self._given.keys() <= places.keys() or any(
            summary(place.value) != self._given.get(path)
            for path, place in places.items()
            if in_files or not _is_read_on(place.value)
        )

    def values(self) -> list[dict[str, Any] | None]:
        """What has changed, JSON-ready: of the dataset or iterable itself by its attributes, else by where it
        is; None instead of that where something has changed that can't be kept."""
        places = self._places()
        summaries = {path: summary(place.value) for path, place in places.items()}
        new = {path for path in summaries if self._given.get(path) != summaries[path]}
        kept: dict[str, Any] = {}
        # What has taken the place of a value is not found again by what it holds.
        lost = self._given.keys() - summaries.keys() or {p for p in new if not self._is_attribute(p)}
        try:
            kept = {path: _encoded(places[path].value, path) for path in new if not lost}
        except JobError:
            lost = new
        own = {path.partition(".")[2]: kept.pop(path) for path in list(kept) if self._is_own(path)}
        return [own, None if lost else kept]

    def set(self, values: Any) -> bool:
        """Continue with what :meth:`values` told, None for nothing; whether that was all."""
        if not values:
            return True
        own, others = values[0], values[1] if len(values) > 1 else {}
        if others is None:
            return False
        places = self._places()
        for path, value in {**{f"{self._root}.{name}": v for name, v in own.items()}, **others}.items():
            if path in places and isinstance(places[path].value, _FROM_OUTSIDE):
                _set_from_outside(places[path].value, value)
            elif path in places:
                found = plain_values.restored(places[path].value, value)
                if found is not places[path].value:
                    places[path].put(found)
            elif self._is_own(path):
                object.__setattr__(self._first, path.partition(".")[2], plain_values.decode(value))
        return True

    @contextmanager
    def put_back(self) -> Iterator[Callable[[], bool]]:
        """What changes inside is as it was afterwards; yields what tells then whether all of it could be."""
        back = self.snapshot()
        try:
            yield back
        finally:
            back()

    def snapshot(self) -> Callable[..., bool]:
        """What has all be as it is now, or ``only`` what is at some paths; it tells whether all is."""
        before = self._places()
        copies = {path: _copied(place.value) for path, place in before.items()}
        summaries = {path: summary(place.value) for path, place in before.items()}

        def back(only: Collection[str] = before.keys()) -> bool:
            now = self._places()
            for path, place in before.items():
                if path in only and (path not in now or summary(now[path].value) != summaries[path]):
                    copies[path](place)
            return self.summaries() == summaries

        return back

    @property
    def _root(self) -> str:
        return "dataset" if isinstance(self._loader, DataLoader) else ""

    @property
    def _first(self) -> Any:
        return self._loader.dataset if isinstance(self._loader, DataLoader) else self._loader

    def _is_own(self, path: str) -> bool:
        root, _, name = path.partition(".")
        return root == self._root and bool(name) and "." not in name and "[" not in name

    def _is_attribute(self, path: str) -> bool:
        """Whether what is there is found in the place of a value, or as a new one of the first object."""
        return path in self._given or self._is_own(path)

    def summaries(self) -> dict[str, Any]:
        """By where it is, what is another once something has changed."""
        return {path: summary(place.value) for path, place in self._places().items()}

    def _places(self) -> dict[str, ValuePlace]:
        return _places(self._loader)


def generators(loader: Any) -> list[Any]:
    """Those of random numbers that the objects behind ``loader`` hold or name, but for the global ones."""
    values = (place.value for place in _places(loader).values())
    return [v for v in values if random_generators.is_generator(v) and not rng.is_global(v)]


def _places(loader: Any) -> dict[str, ValuePlace]:
    """All values that may be state, by where they are."""
    found: dict[str, ValuePlace] = {}
    visited: set[int] = set()
    if isinstance(loader, DataLoader):
        waiting = [(name, getattr(loader, name), cannot) for name in reversed(_ROOTS)]
    else:
        waiting = [("", loader, cannot)]
    for _ in range(_MOST):
        if not waiting:
            break
        path, value, put = waiting.pop()
        if isinstance(value, _CODE) or not _is_immutable(value):
            if id(value) in visited:
                continue
            visited.add(id(value))
        parts = list(_parts(value))
        if isinstance(value, _CONTAINERS) or not (parts or isinstance(value, _CODE)):
            found[path] = ValuePlace(value, put)
        if own_classes.is_own(type(value).__module__):
            parts.append(("[class]", type(value), cannot))
        waiting += [(f"{path}{step}", part, place) for step, part, place in reversed(parts)]
    return found


def _parts(value: Any) -> Iterator[tuple[str, Any, Put]]:
    """What an object, a container or a function holds: a step of its path, the value, its place."""
    if isinstance(value, types.FunctionType):
        yield from _parts_of_function(value)
    elif isinstance(value, type):
        yield from _parts_of_class(value)
    elif isinstance(value, functions.FUNCTIONS):
        yield from functions.parts_of(value)
    elif isinstance(value, types.BuiltinMethodType):
        if not isinstance(value.__self__, types.ModuleType):
            yield "[self]", value.__self__, cannot
    elif isinstance(value, types.GeneratorType):
        yield from _named(value.gi_code, value.gi_frame.f_globals if value.gi_frame else {})
    elif isinstance(value, _CONTAINERS):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in itertools.islice(items, _LOOKED_INTO if len(value) <= _LOOKED_INTO else 0):
            if not _is_immutable(part):
                yield f"[{key!r}]", part, cannot
    elif not (
        plain_values.is_scalar(value) or isinstance(value, (torch.Tensor, types.ModuleType, *_FROM_OUTSIDE))
    ):
        for name, part in list(getattr(value, "__dict__", {}).items()):
            yield f".{name}", part, functools.partial(object.__setattr__, value, name)


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, Any, Put]]:
    """What it keeps; if it is the job's own, the global variables it names, too."""
    yield from functions.parts_of(function)
    if own_classes.is_own(function.__module__):
        yield from _named(function.__code__, function.__globals__)


def _parts_of_class(kind: type) -> Iterator[tuple[str, Any, Put]]:
    """The attributes and methods of it and its bases, as far as they are the job's own."""
    for base in kind.__mro__:
        for name, part in list(vars(base).items()) if own_classes.is_own(base.__module__) else ():
            part = getattr(part, "__func__", getattr(part, "fget", part))
            if isinstance(part, types.FunctionType) or not name.startswith("__"):
                yield f"[class {base.__qualname__}].{name}", part, functools.partial(setattr, base, name)


def _named(code: types.CodeType, variables: dict[str, Any]) -> Iterator[tuple[str, Any, Put]]:
    """The global variables that ``code`` and the functions inside it name, also those of modules it names."""
    names = functions.names_in(code)
    waiting = [variables]
    modules = {id(variables)}
    while waiting:
        variables = waiting.pop()
        for name in sorted(names & variables.keys()):
            part = variables[name]
            if not isinstance(part, types.ModuleType):
                where = f"[global {variables.get('__name__')}.{name}]"
                yield where, part, functools.partial(operator.setitem, variables, name)
            elif own_classes.is_own(part.__name__) and id(vars(part)) not in modules:
                modules.add(id(vars(part)))
                waiting.append(vars(part))


def _is_immutable(value: Any) -> bool:
    if isinstance(value, np.ndarray | bytearray) or random_generators.is_generator(value):
        return False
    return plain_values.is_scalar(value) or isinstance(value, type | types.ModuleType)


def summary(value: Any) -> Any:
    """What is another if ``value`` has changed."""
    if random_generators.is_generator(value):
        return json.dumps(plain_values.encode(value, "it"))
    if type(value) is np.ndarray:
        few = value.reshape(-1)[:: max(1, value.size // _READ)]
        plain = value.dtype.kind in "biufc"
        return value.shape, str(value.dtype), zlib.crc32(few.tobytes()) if plain else id(value)
    if isinstance(value, torch.Tensor):
        return _summary_of_tensor(value)
    if isinstance(value, _FROM_OUTSIDE):
        return _from_outside(value)
    if _is_read_on(value):
        return object()  # which is no other's equal: how far it has got, nobody sees
    if plain_values.is_scalar(value):
        return type(value).__name__, repr(value)
    if isinstance(value, dict):
        return [(key, _of_item(part)) for key, part in value.items()] if len(value) <= _READ else len(value)
    if isinstance(value, _CONTAINERS):
        some = itertools.islice(value, 0, None, 1 + len(value) // _READ)
        return type(value).__name__, len(value), list(map(_of_item, some))
    return repr(seen(value, {}, 4))


def _summary_of_tensor(value: torch.Tensor) -> Any:
    small = value.nbytes <= plain_values.LARGEST and value.device.type == "cpu"
    if type(value) is not torch.Tensor or value.layout != torch.strided or value.is_quantized or not small:
        return "tensor", id(value), value._version
    numbers = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return value.shape, str(value.dtype), zlib.crc32(numbers.data)


def _is_read_on(value: Any) -> bool:
    """Whether it is an open file, or an iterator of which nobody sees how far it has got, as a database's."""
    if isinstance(value, io.IOBase):
        return True
    if (
        not isinstance(value, Iterator)
        or isinstance(value, types.GeneratorType)
        or hasattr(value, "__dict__")
    ):
        return False
    try:
        return value.__reduce__()[0] is copyreg.__dict__["_reconstructor"]  # which tells nothing
    except Exception:
        return True


def _from_outside(value: Any) -> int | str | None:
    """The place that an open file is read from next, None where nobody knows; or numbers as text."""
    if not isinstance(value, io.IOBase):
        numbers = ctypes.string_at(ctypes.addressof(value), ctypes.sizeof(value))
        return base64.b64encode(numbers).decode()
    try:
        return value.tell() if value.readable() and value.seekable() else None
    except (OSError, ValueError):  # closed, or gone through as an iterator
        return None


def _set_from_outside(value: Any, told: int | str | None) -> None:
    """Have ``value`` be as :func:`_from_outside` told."""
    if isinstance(value, io.IOBase):
        if isinstance(told, int):
            value.seek(told)
    elif isinstance(told, str):
        numbers = base64.b64decode(told)
        ctypes.memmove(ctypes.addressof(value), numbers, min(len(numbers), ctypes.sizeof(value)))


def _encoded(value: Any, path: str) -> Any:
    """``value`` as JSON can hold it.

    :raises JobError: where it can't.
    """
    if not isinstance(value, _FROM_OUTSIDE):
        return plain_values.encode(value, path)
    if (told := _from_outside(value)) is None:
        raise JobError(f"nobody knows where {path} is read from next")
    return told


def _of_item(value: Any) -> Any:
    return value if type(value) in (int, str, bool, float, bytes, type(None)) else id(value)


def _copied(value: Any) -> Callable[[ValuePlace], object]:
    """What gives a place the value it has now."""
    if (state := random_generators.generator_state(value)) is not None:
        return lambda place: random_generators.set_generator_state(place.value, state)
    if isinstance(value, _FROM_OUTSIDE):
        told = _from_outside(value)
        return lambda place: _set_from_outside(place.value, told)
    if isinstance(value, np.ndarray | torch.Tensor):
        if isinstance(value, np.memmap) or value.nbytes > plain_values.LARGEST:
            return lambda place: place.put(place.value)
        array = value.clone() if isinstance(value, torch.Tensor) else value.copy()
        return functools.partial(_refill_array, array)
    if isinstance(value, _CONTAINERS) and not isinstance(value, tuple):
        return functools.partial(_refill, copy.copy(value))
    if type(value) is itertools.count:
        then = copy.copy(value)
        return lambda place: place.put(copy.copy(then))
    return lambda place: place.put(place.value)


def _refill_array(then: Any, place: ValuePlace) -> None:
    with torch.no_grad():
        place.value[...] = then
    place.put(place.value)


def _refill(then: Any, place: ValuePlace) -> None:
    container = place.value
    container.clear()
    if isinstance(container, dict | set):
        container.update(then)
    else:
        container.extend(then)
    place.put(container)
