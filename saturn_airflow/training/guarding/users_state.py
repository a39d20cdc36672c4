"""What the job's own code remembers outside of its model: counters and lists among its globals and objects.

A loss function that counts its calls in a global variable must not count those that only compare.
"""

from __future__ import annotations

import copy
import functools
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from saturn_airflow.model.errors import JobError
from saturn_airflow.model.jobs import Job
from saturn_airflow.training.functions import FUNCTIONS, ValuePlace, is_own, places_in
from saturn_airflow.training.optim import own_classes, plain_values, random_generators
from saturn_airflow.training.used_modules import python_modules

# Numbers of a tensor that is always copied, those of all others together, and items of a container: what is
# larger is data, no state.
_SMALL, _MOST_NUMBERS, _MOST_ITEMS = 4096, 2**24, 2**17
_IMMUTABLE = frozenset({int, float, str, bytes, bool, type(None)})
_CONTAINERS = (list, dict, set, OrderedDict, Counter, defaultdict, deque)
# What names of hooks say, and where a module has them.
_HOOKS = {
    "pre-hook": "_forward_pre_hooks",
    "hook": "_forward_hooks",
    "backward pre-hook": "_backward_pre_hooks",
    "backward hook": "_backward_hooks",
}


class UsersState:
    """Numbers, containers and small tensors in the modules that a job's code is in, as they are now.

    :param model: the job's; what it holds itself is not looked at.
    :param beside: what else to look at.
    """

    def __init__(self, job: Job, model: nn.Module, beside: Sequence[Any] = ()) -> None:
        self._names = python_modules(job, model)
        self._generators: list[tuple[Any, Any]] = []
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[Any, Any]] = []
        self._classes: list[tuple[type, dict[str, Any]]] = []
        self._kept: list[ValuePlace] = []
        self._numbers = 0
        #: What is not copied, and what shows that it has changed.
        self._too_large: list[tuple[Any, int]] = []
        own = frozenset(map(id, model.modules()))
        modules = set(own)  # and functions that were looked at
        seen: set[int] = set()
        self._look([vars(sys.modules[name]) for name in self._names], seen, modules)
        #: Whether the job's code refers to a module of the model, and would not to one of a copy.
        self.holds_model = not own.isdisjoint(seen)
        # Containers of modules are the model's; objects may be anybody's.
        held = (value for module in model.modules() for value in vars(module).values())
        waiting = [value for value in held if type(value).__module__ in self._names]
        functions = (function for _, function in functions_of(model))
        self._look([*waiting, *functions, *beside], seen, modules)

    def _look(self, waiting: list[Any], seen: set[int], modules: set[int]) -> None:
        """Look at all that can be reached from ``waiting`` and was not ``seen``.

        :param modules: of the model, by their ids, whose inside is not looked at.
        """
        while waiting:
            value = waiting.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            if id(value) in modules:
                continue
            if type(value) in _CONTAINERS:
                if len(value) > _MOST_ITEMS:
                    self._too_large.append((value, len(value)))
                    continue
                self._containers.append((value, copy.copy(value)))
                items = (item for item in _items(value) if type(item) not in _IMMUTABLE)
                waiting += [item for item in items if self._is_state(item)]
            elif isinstance(value, FUNCTIONS):
                places = [place for _, place in places_in("", value, modules)]
                self._kept += places
                waiting += [place.value for place in places if self._is_state(place.value)]
                if isinstance(value, types.FunctionType) and is_own(value):
                    waiting.append(vars(value))  # which may get attributes
            elif isinstance(value, torch.Tensor):
                if not isinstance(value, nn.Parameter) and self._has_room(value, value.numel()):
                    self._tensors.append((value, value.detach().clone()))
            elif isinstance(value, np.ndarray):
                if value.flags.writeable and self._has_room(value, value.size):
                    self._tensors.append((value, value.copy()))
            elif (state := random_generators.generator_state(value)) is not None:
                self._generators.append((value, state))
            elif isinstance(value, type):
                own = {name: part for name, part in vars(value).items() if _is_data_of_class(name, part)}
                self._classes.append((value, own))
                waiting += [part for part in own.values() if self._is_state(part)]
                waiting += [part for part in vars(value).values() if isinstance(part, FUNCTIONS)]
            else:
                for name in own_classes.slots_of(value):
                    held_there = getattr(value, name)
                    self._kept.append(
                        ValuePlace(held_there, functools.partial(object.__setattr__, value, name))
                    )
                    waiting += [held_there] if self._is_state(held_there) else []
                if hasattr(value, "__dict__"):
                    waiting.append(vars(value))

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """What changes inside is as it was afterwards."""
        try:
            yield
        finally:
            self.restore()

    def restore(self) -> None:
        """Have all be as it was when this was made.

        :raises JobError: when something has changed of which there is no copy.
        """
        for container, then in self._containers:
            _restore(container, then)
        for kind, attributes in self._classes:
            for name, value in attributes.items():
                if vars(kind).get(name) is not value:
                    setattr(kind, name, value)
        for place in self._kept:
            place.put(place.value)
        for generator, state in self._generators:
            random_generators.set_generator_state(generator, state)
        with torch.no_grad():
            for tensor, then in self._tensors:
                tensor[...] = then
        if changed := [value for value, then in self._too_large if _sign_of_change(value) != then]:
            raise JobError(
                f"the job's code changes a {type(changed[0]).__name__} of its own as it trains, which is too "
                "large to be put back where a step is only compared; keep it in a buffer of the model "
                "(register_buffer)"
            )

    def _has_room(self, value: Any, numbers: int) -> bool:
        """Whether there is room for a copy of a tensor or array; else it is watched."""
        if numbers <= _SMALL:
            return True
        if self._numbers + numbers > _MOST_NUMBERS:
            self._too_large.append((value, _sign_of_change(value)))
            return False
        self._numbers += numbers
        return True

    def _is_state(self, value: Any) -> bool:
        kind: type = type(value)
        own: type = value if isinstance(value, type) else kind
        return _holds_state(kind) or own.__module__ in self._names


@functools.cache
def _holds_state(kind: type) -> bool:
    """Whether values of a type are looked at, whoever's they are."""
    if kind in _CONTAINERS or random_generators.is_generator_type(kind):
        return True
    return issubclass(kind, (torch.Tensor, np.ndarray, nn.Module, *FUNCTIONS))


def functions_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The functions that are attributes of a model's modules, and the hooks on their passes, by names.

    Of hooks those of the job's own, objects among them: techniques have further ones.
    """
    for prefix, module in model.named_modules():
        for key, value in list(vars(module).items()):
            if key not in plain_values.OF_MODULES and isinstance(value, FUNCTIONS):
                yield f"{prefix}.{key}" if prefix else key, value
        for kind, held in _HOOKS.items():
            for number, hook in enumerate(filter(_is_own_hook, list(getattr(module, held).values()))):
                yield f"{prefix}[{kind} {number}]", hook


def _is_own_hook(hook: Any) -> bool:
    return is_own(hook) if isinstance(hook, FUNCTIONS) else own_classes.fields_of(hook) is not None


def _is_data_of_class(name: str, value: Any) -> bool:
    """Whether an attribute of a class may be what it counts, and no method or description of it."""
    return not name.startswith("__") and not callable(value) and not hasattr(value, "__get__")


def _sign_of_change(value: Any) -> int:
    """What is another number once a tensor, or the length of a container, has changed; arrays do not tell."""
    if isinstance(value, torch.Tensor):
        return value._version
    return 0 if isinstance(value, np.ndarray) else len(value)


def _items(container: Any) -> list[Any]:
    return list(container.values() if isinstance(container, dict) else container)


def _restore(container: Any, then: Any) -> None:
    """Give a container the items it had, whoever else refers to it."""
    if isinstance(container, dict):
        is_module = "__spec__" in container
        for key in container.keys() - then.keys():
            # torch.compile keeps what it makes, such as __compiled_fn_1, in the module of what it compiles.
            if not (is_module and key.startswith("__")):
                del container[key]
        for key, value in then.items():
            if key not in container or container[key] is not value:
                container[key] = value
    elif isinstance(container, set):
        container.intersection_update(then)
        container.update(then)
    elif len(container) != len(then) or any(a is not b for a, b in zip(container, then, strict=True)):
        container.clear()
        container.extend(then)
