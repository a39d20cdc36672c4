"""What the job's own code remembers outside of its model: counters and lists among its globals and objects.

A loss function that counts its calls in a global variable must not count those that only compare.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import types
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from saturn_airflow.model import references
from saturn_airflow.model.jobs import Job
from saturn_airflow.training.functions import FUNCTIONS, ValuePlace, is_own, places_in
from saturn_airflow.training.optim import own_classes, plain_values

_LARGEST = 4096  # items of a container, or numbers of a tensor: what is larger is data, no state
_CONTAINERS = (list, dict, set, OrderedDict, Counter, deque)
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
    """

    def __init__(self, job: Job, model: nn.Module) -> None:
        self._names = python_modules(job, model)
        self._generators: list[tuple[Any, Any]] = []
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[Any, Any]] = []
        self._classes: list[tuple[type, dict[str, Any]]] = []
        self._kept: list[ValuePlace] = []
        seen = set(map(id, model.modules()))
        modules = set(seen)
        waiting: list[Any] = [vars(sys.modules[name]) for name in self._names]
        # Containers of modules are the model's; objects may be anybody's.
        held = (value for module in model.modules() for value in vars(module).values())
        waiting += [value for value in held if type(value).__module__ in self._names]
        waiting += [function for _, function in functions_of(model)]
        while waiting:
            value = waiting.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, FUNCTIONS):
                places = [place for _, place in places_in("", value, modules)]
                self._kept += places
                waiting += [place.value for place in places if self._is_state(place.value)]
                if isinstance(value, types.FunctionType) and is_own(value):
                    waiting.append(vars(value))  # which may get attributes
            elif isinstance(value, torch.Tensor):
                if not isinstance(value, nn.Parameter) and value.numel() <= _LARGEST:
                    self._tensors.append((value, value.detach().clone()))
            elif isinstance(value, np.ndarray):
                if value.size <= _LARGEST and value.flags.writeable:
                    self._tensors.append((value, value.copy()))
            elif (state := plain_values.generator_state(value)) is not None:
                self._generators.append((value, state))
            elif type(value) in _CONTAINERS:
                self._containers.append((value, copy.copy(value)))
                waiting += [item for item in _items(value) if self._is_state(item)]
            elif isinstance(value, type):
                own = {name: part for name, part in vars(value).items() if _is_data_of_class(name, part)}
                self._classes.append((value, own))
                waiting += [part for part in own.values() if self._is_state(part)]
                waiting += [part for part in vars(value).values() if isinstance(part, FUNCTIONS)]
            elif hasattr(value, "__dict__"):
                waiting.append(vars(value))

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """What changes inside is as it was afterwards."""
        try:
            yield
        finally:
            self.restore()

    def restore(self) -> None:
        """Have all be as it was when this was made."""
        for container, then in self._containers:
            _restore(container, then)
        for kind, attributes in self._classes:
            for name, value in attributes.items():
                if vars(kind).get(name) is not value:
                    setattr(kind, name, value)
        for place in self._kept:
            place.put(place.value)
        for generator, state in self._generators:
            plain_values.set_generator_state(generator, state)
        with torch.no_grad():
            for tensor, then in self._tensors:
                tensor[...] = then

    def _is_state(self, value: Any) -> bool:
        if type(value) in _CONTAINERS:
            return len(value) <= _LARGEST
        if isinstance(value, torch.Tensor | np.ndarray) or plain_values.generator_state(value) is not None:
            return True
        if isinstance(value, type):
            return value.__module__ in self._names
        if isinstance(value, FUNCTIONS):
            return True
        if callable(value) and type(value).__module__ == "builtins":
            return False
        return isinstance(value, nn.Module) or type(value).__module__ in self._names


def python_modules(job: Job, model: nn.Module) -> set[str]:
    """Names of the Python modules that hold the code of the job's model, loss, optimizer and schedule, and of
    those of the job's own that they use.
    """
    # Techniques may put a class of their own before that of a module, as FSDP does.
    names = {base.__module__ for module in model.modules() for base in type(module).__mro__}
    for reference in (job.load_model, job.loss_function, job.hparams.optimizer, job.hparams.lr_scheduler):
        if reference:
            # Who uses it says what is wrong with it.
            with contextlib.suppress(Exception):
                references.load(str(reference))
            names.add(str(reference).partition(":")[0])
    found = {name for name in names if name in sys.modules and not own_classes.is_library(name)}
    waiting = list(found)
    while waiting:
        used = {_module_of(value) for value in list(vars(sys.modules[waiting.pop()]).values())}
        new = {name for name in used - found if name in sys.modules and own_classes.is_own(name)}
        found |= new
        waiting += new
    return found


def _module_of(value: Any) -> str:
    """The name of the Python module that a value is, or that a class or function is of; else nothing."""
    if isinstance(value, types.ModuleType):
        return value.__name__
    return (value.__module__ or "") if isinstance(value, type | types.FunctionType) else ""


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
