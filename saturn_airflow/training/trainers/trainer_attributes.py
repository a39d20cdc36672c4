"""What a job's own ``Trainer`` class remembers as attributes, which no checkpoint of a ``Trainer`` has."""

from __future__ import annotations

import dis
import functools
import itertools
import types
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn
from transformers import Trainer

from saturn_airflow.model.errors import JobError
from saturn_airflow.training.model_attributes import is_plain
from saturn_airflow.training.optim import own_classes, plain_values

# What is put in the place of methods.
_SET_HERE = ("training_step", "get_train_dataloader", "_init_training_state", "_load_rng_state")
_DEEP = 4  # attributes of attributes of ... that are looked at where nothing can be kept
_LOOKED_AT = 64  # items of a container there


class TrainerAttributes:
    """The attributes of ``trainer``, before its first step, that are not transformers' own."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        model: nn.Module = trainer.model  # type: ignore[assignment]
        tensors = itertools.chain(model.parameters(), model.buffers())
        self._known = {id(tensor) for tensor in tensors} | {id(module) for module in model.modules()}
        own = own_attributes(trainer)
        self._known |= {id(value) for name, value in vars(trainer).items() if name not in own}
        self._known.add(id(getattr(trainer.optimizer, "optimizer", None)))
        self._given = {name: self._summary(value) for name, value in self._own().items()}

    def values(self) -> dict[str, Any]:
        """What has changed, JSON-ready.

        :raises JobError: when something has that can't be kept.
        """
        found = {}
        for name, value in self._own().items():
            if self._given.get(name) == self._summary(value):
                continue
            what = f"what {type(self._trainer).__name__} keeps as its attribute {name!r}"
            if not is_plain(value, objects=True):
                raise JobError(
                    f"{what}, a {type(value).__name__}, changes while it trains, and no checkpoint of a "
                    "Trainer has it; keep numbers, tensors, or lists of such, make it part of the model, or "
                    "give the model with a training_step to a Job (own_step=True)"
                )
            found[name] = plain_values.encode(value, what)
        return found

    def set(self, values: Mapping[str, Any]) -> None:
        """Continue with what :meth:`values` told."""
        for name, value in values.items():
            setattr(self._trainer, name, plain_values.restored(vars(self._trainer).get(name), value))

    def _own(self) -> dict[str, Any]:
        return own_attributes(self._trainer)

    def _summary(self, value: Any) -> Any:
        """What is another if ``value`` has changed."""
        if is_plain(value, objects=True):
            try:
                return plain_values.encode(value, "it")
            except JobError:
                pass
        return self._seen(value, _DEEP)

    def _seen(self, value: Any, deep: int) -> Any:
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, torch.Tensor):
            return "trained" if id(value) in self._known else (value.data_ptr(), value._version)
        if id(value) in self._known or isinstance(value, type | types.ModuleType | Trainer) or not deep:
            return type(value).__name__
        if isinstance(value, nn.Module):
            tensors = itertools.chain(value.parameters(), value.buffers())
            return [self._seen(tensor, deep) for tensor in tensors]
        parts: Any = ()
        if isinstance(value, torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler):
            parts = value.state_dict()
        elif isinstance(value, Mapping | list | tuple | set):
            parts = value
        elif own_classes.is_own(type(value).__module__):
            parts = getattr(value, "__dict__", {})
        pairs = parts.items() if isinstance(parts, Mapping) else enumerate(parts)
        seen = [(str(key), self._seen(part, deep - 1)) for key, part in itertools.islice(pairs, _LOOKED_AT)]
        return [type(value).__name__, len(parts), seen]


def own_attributes(trainer: Trainer) -> dict[str, Any]:
    """The attributes that are not transformers' own."""
    kind: Any = type(trainer)
    library = set_by_libraries(kind)
    return {name: value for name, value in vars(trainer).items() if name not in library}


@functools.cache
def set_by_libraries(kind: Hashable) -> set[str]:
    """The names of attributes that the code of libraries, such as transformers and trl, assigns."""
    assigned = map(_assigned, _functions(cast(type, kind)))
    return {*_SET_HERE, *itertools.chain.from_iterable(assigned)}


def _functions(kind: type) -> Iterator[types.CodeType]:
    for base in kind.__mro__:
        for function in () if own_classes.is_own(base.__module__) else list(vars(base).values()):
            while hasattr(function, "__wrapped__"):
                function = function.__wrapped__
            if isinstance(code := getattr(function, "__code__", None), types.CodeType):
                yield code


def _assigned(code: types.CodeType) -> Iterator[str]:
    """The attributes that a method assigns to its own object: the name of one that it assigns to another, as
    ``self.state.global_step``, the job's class may have for its own."""
    own = code.co_varnames[:1]
    lines = (line for line in dis.get_instructions(code) if line.opname != "EXTENDED_ARG")
    for before, line in itertools.pairwise(lines):
        if line.opname == "STORE_ATTR" and before.opname.startswith(("LOAD_FAST", "LOAD_DEREF")):
            loaded = before.argval if isinstance(before.argval, tuple) else (before.argval,)
            if loaded[-1:] == own:
                yield line.argval
