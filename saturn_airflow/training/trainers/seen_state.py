"""What can be seen of what a ``Trainer`` and a job's code remember, to be compared with another time.

A checkpoint holds some of it; what it does not hold is another after training was stopped and resumed.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, Sampler
from transformers import Trainer
from transformers.data.data_collator import DataCollatorMixin

from saturn_airflow.model.jobs import Job
from saturn_airflow.training.data_state import summary
from saturn_airflow.training.functions import FUNCTIONS, places_in
from saturn_airflow.training.optim import own_classes, plain_values, random_generators
from saturn_airflow.training.trainers.trainer_attributes import own_attributes
from saturn_airflow.training.used_modules import python_modules

#: By where it is, what is another once it has changed.
Seen = dict[str, Any]

_DEEP = 6  # attributes of attributes of ...
_ITEMS = 64  # of a container that are looked at
_CONTAINERS = (list, tuple, set, frozenset, deque)
_NUMBERS = 2**20  # of a tensor or array; larger ones are data
# Whose attributes are looked at, though they are a library's.
_LIBRARIES = (Dataset, DataCollatorMixin, Sampler, LRScheduler)


def of_data(trainer: Trainer, job: Job, collator: Any) -> Seen:
    """What the data of ``trainer`` and a collator remember, and what is global in the job's code."""
    data = {"train_dataset": trainer.train_dataset, "data_collator": collator}
    return _seen({**data, **_globals_of(trainer, job)}, trainer)


def of_parts(parts: Mapping[str, Any], trainer: Trainer, left_out: Sequence[Any] = ()) -> Seen:
    """What ``parts`` of ``trainer`` remember, but for what they hold of those ``left_out``."""
    return _seen(parts, trainer, left_out)


def samplers_of(loader: Any) -> dict[str, Any]:
    """The samplers of the job's own that ``loader`` asks for indices, by their classes' names."""
    order = getattr(loader, "batch_sampler", None)
    inner = getattr(order, "batch_sampler", None)
    parts = (order, getattr(order, "sampler", None), inner, getattr(inner, "sampler", None))
    return {type(part).__name__: part for part in parts if own_classes.is_own(type(part).__module__)}


def of_trainer(trainer: Trainer, job: Job) -> Seen:
    """What ``trainer``, its callbacks, data, optimizer and schedule remember, its arguments, and what is
    global in the job's code."""
    optimizer: Any = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    roots = {
        "train_dataset": trainer.train_dataset,
        "data_collator": trainer.data_collator,
        "compute_loss_func": trainer.compute_loss_func,
        "lr_scheduler": getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler),
        "optimizer": _attributes_of(optimizer),
        "args": vars(trainer.args),
        **{name: _added_to(getattr(trainer, name)) for name in ("state", "control")},
        **{
            f"{type(one).__name__} (callback {number})": one
            for number, one in enumerate(trainer.callback_handler.callbacks)
        },
        type(trainer).__name__: own_attributes(trainer),
        **_globals_of(trainer, job),
    }
    return _seen(roots, trainer)


def sums_of(trainer: Trainer) -> dict[str, float]:
    """The sum of each parameter and buffer of the model of ``trainer``."""
    model: Any = trainer.model
    tensors = [(name, t.detach()) for name, t in (*model.named_parameters(), *model.named_buffers())]
    real = {name: torch.view_as_real(t) if t.is_complex() else t for name, t in tensors}
    return {
        f"the model's {name}": float(t.sum(dtype=torch.float64))
        for name, t in real.items()
        if t.layout == torch.strided and not t.is_quantized
    }


def differing(before: Seen, now: Seen) -> list[str]:
    """Where both say something, and not the same: what one lacks may be what is kept to save time."""
    return [where for where, value in before.items() if where in now and now[where] != value]


def _added_to(value: Any) -> dict[str, Any]:
    """The attributes of a dataclass's object that are none of its fields."""
    fields = {field.name for field in dataclasses.fields(value)}
    return {name: part for name, part in vars(value).items() if name not in fields}


def _globals_of(trainer: Trainer, job: Job) -> dict[str, Any]:
    model: Any = trainer.model
    found: dict[str, Any] = {}
    for module in sorted(python_modules(job, model)):
        for name, value in list(vars(sys.modules[module]).items()):
            if isinstance(value, type) and value.__module__ == module:
                own = vars(value).items()
                found |= {f"{module}.{name}.{key}": part for key, part in own if not key.startswith("__")}
            elif not name.startswith("__"):
                found[f"{module}.{name}"] = value
    return found


def _seen(roots: Mapping[str, Any], trainer: Trainer, left_out: Sequence[Any] = ()) -> Seen:
    model: Any = trainer.model
    tensors = itertools.chain(model.parameters(), model.buffers())
    visited = {id(part) for part in (trainer, *left_out, *model.modules(), *tensors)}
    return {where: found for name, root in roots.items() for where, found in _in(name, root, visited, _DEEP)}


def _in(where: str, value: Any, visited: set[int], deep: int) -> Iterator[tuple[str, Any]]:
    if type(value) in (bool, int, float, str):
        yield where, value
        return
    if value is None or id(value) in visited or deep < 0:
        return  # what is None may be made when it is first needed
    visited.add(id(value))
    if random_generators.is_generator(value):
        yield where, plain_values.try_encode(value)
    elif isinstance(value, torch.Tensor):
        if value.numel() <= _NUMBERS and not value.is_meta:
            yield where, summary(value.detach().cpu())
    elif isinstance(value, np.ndarray):
        if value.size <= _NUMBERS:
            yield where, summary(value)
    elif isinstance(value, FUNCTIONS):
        for path, place in places_in(where, value, set()):
            if not isinstance(place.value, FUNCTIONS):
                yield from _in(path, place.value, visited, deep - 1)
    elif isinstance(value, Mapping) and plain_values.is_mapping(value):  # a library's may load what it maps
        for key, part in itertools.islice(value.items(), _ITEMS):
            yield from _in(f"{where}[{key!r}]", part, visited, deep - 1)
    elif type(value) in _CONTAINERS:
        yield f"the length of {where}", len(value)
        items = () if isinstance(value, set | frozenset) else itertools.islice(value, _ITEMS)
        for number, part in enumerate(items):
            yield from _in(f"{where}[{number}]", part, visited, deep - 1)
    elif isinstance(value, nn.Module):
        for name, part in itertools.chain(value.named_parameters(), value.named_buffers()):
            yield from _in(f"{where}.{name}", part, visited, deep)
    else:
        for name, part in _attributes_of(value).items():
            yield from _in(f"{where}.{name}", part, visited, deep - 1)


def _attributes_of(value: Any) -> dict[str, Any]:
    if isinstance(value, Optimizer):
        own = vars(value) if own_classes.is_own(type(value).__module__) else {}
        return {name: part for name, part in own.items() if name not in ("state", "param_groups")}
    if (fields := own_classes.fields_of(value)) is not None:
        return fields
    known = isinstance(value, _LIBRARIES) or own_classes.is_own(type(value).__module__)
    return dict(vars(value)) if known and hasattr(value, "__dict__") else {}
