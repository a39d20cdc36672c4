"""What modules hold besides their parameters, remembered, so that a computation can be repeated exactly."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from saturn_airflow.training.optim import own_classes, plain_values

# What every module has of its own, but for its mode; ``forward`` is there where something was put around it.
_INTERNALS = frozenset([*vars(nn.Module()), "forward", "_compiled_call_impl"]) - {"training"}
_IMMUTABLE = frozenset({int, float, str, bool, type(None), bytes, torch.dtype, torch.device, torch.Size})
_REFILLED = (list, dict, OrderedDict, Counter, defaultdict, deque)
_CONTAINERS = (list, tuple, set, frozenset, dict, OrderedDict, Counter, defaultdict, deque)
_COPYABLE = (np.ndarray, bytearray, random.Random, np.random.Generator, np.random.RandomState)


def parameters_of(module: nn.Module) -> Iterator[nn.Parameter]:
    """All parameters, whatever a ``parameters()`` of the module's own leaves out, such as frozen ones."""
    return nn.Module.parameters(module)


class ModuleState:
    """Buffers and attributes of modules, whether they train, and the random generators, as they are now.

    Tensors, numpy arrays, generators, Python's own containers and dataclasses of the job are copied.
    Other objects are remembered as such: what changes inside of them is not seen.

    :param modules: each once.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        memo: dict[int, Any] = {}
        self._entries = [copied(_entries(holder), memo) for holder in self._holders()]
        self._generators = _generators()
        self._with_extra_state = [module for module in self._modules if has_extra_state(module)]
        self._extra_states = self._get_extra_states()

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """The remembered state inside, the one before after: changes that are made inside are lost.

        So are hooks that modules get inside: a model that hooks itself when it is first called, and notes
        that in an attribute, would be hooked twice.
        """
        now = [_entries(holder) for holder in self._holders()]
        hooks = [(held, tuple(held)) for held in self._hooks()]
        generators, extra_states = _generators(), self._get_extra_states()
        memo: dict[int, Any] = {}
        try:
            for holder, entries in zip(self._holders(), self._entries, strict=True):
                _replace(holder, copied(entries, memo))
            self._set_extra_states(self._extra_states)
            _set_generators(self._generators)
            yield
        finally:
            for holder, entries in zip(self._holders(), now, strict=True):
                _replace(holder, entries)
            for held, before in hooks:
                for key in held.keys() - before if len(held) > len(before) else ():
                    del held[key]
            self._set_extra_states(extra_states)
            _set_generators(generators)

    def _get_extra_states(self) -> list[Any]:
        return [plain_values.encode(module.get_extra_state(), "it") for module in self._with_extra_state]

    def _set_extra_states(self, states: Iterable[Any]) -> None:
        for module, state in zip(self._with_extra_state, states, strict=True):
            module.set_extra_state(plain_values.decode(state))

    def _holders(self) -> Iterator[dict[str, Any]]:
        for module in self._modules:
            yield module._buffers
            yield vars(module)

    def _hooks(self) -> Iterator[dict[int, Any]]:
        for module in self._modules:
            yield module._forward_pre_hooks
            yield module._forward_hooks
            yield module._backward_pre_hooks
            yield module._backward_hooks


def has_extra_state(module: nn.Module) -> bool:
    """Whether a module tells by ``get_extra_state`` what it keeps, in numbers or other plain values."""
    if type(module).get_extra_state is nn.Module.get_extra_state:
        return False
    return "unknown" not in plain_values.try_encode({"": module.get_extra_state()})


def copied(value: Any, memo: dict[int, Any], *, tensors: bool = True) -> Any:
    """A copy of ``value`` as deep as it can be seen into; what is there twice is there twice in the copy.

    :param memo: what was copied already, by id.
    :param tensors: copy tensors too; parameters never are.
    """
    if type(value) in _IMMUTABLE:
        return value
    if id(value) in memo:
        return memo[id(value)][1]
    if isinstance(value, torch.Tensor):
        if isinstance(value, nn.Parameter) or not tensors:
            return value
        result: Any = value.detach().clone().requires_grad_(value.requires_grad)
    elif isinstance(value, _COPYABLE):
        result = copy.deepcopy(value)
    elif isinstance(value, torch.Generator):
        result = value.clone_state()
    elif type(value) in _REFILLED:
        result = copy.copy(value)
        if not isinstance(value, dict):
            result.clear()
    elif type(value) in _CONTAINERS:
        result = type(value)([copied(item, memo, tensors=tensors) for item in value])
    elif type(value) is itertools.count:
        result = copy.copy(value)
    elif dataclasses.is_dataclass(value) and own_classes.fields_of(value) is not None:
        result = object.__new__(type(value))
    else:
        return value
    # The value is kept too, so that its id is not given to another one.
    memo[id(value)] = (value, result)
    _refill(value, result, functools.partial(copied, memo=memo, tensors=tensors))
    return result


def _refill(value: Any, result: Any, copy_of: Callable[[Any], Any]) -> None:
    """Give what can hold itself, and lies in ``result`` by now, its contents."""
    if type(value) in _REFILLED and isinstance(value, dict):
        for key, item in value.items():
            result[key] = copy_of(item)
    elif type(value) is list:
        result[:] = map(copy_of, value)
    elif type(value) is deque:
        result.extend(map(copy_of, list(value)))
    elif type(value) not in _CONTAINERS and (fields := own_classes.fields_of(value)) is not None:
        for name, item in fields.items():
            object.__setattr__(result, name, copy_of(item))


def _entries(holder: Mapping[str, Any]) -> dict[str, Any]:
    # What a module that TorchScript has compiled holds is no dictionary, but looks like one.
    return {key: holder[key] for key in set(holder.keys()) - _INTERNALS}


def _replace(holder: dict[str, Any], entries: Mapping[str, Any]) -> None:
    for key in set(holder.keys()) - entries.keys() - _INTERNALS:
        del holder[key]
    for key, value in entries.items():
        holder[key] = value


def _generators() -> tuple[Any, ...]:
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return (
        random.getstate(),
        np.random.get_state(),
        torch.get_rng_state(),
        torch.cuda.get_rng_state() if on_gpu else None,
    )


def _set_generators(states: tuple[Any, ...]) -> None:
    python, numpys, cpu, gpu = states
    random.setstate(python)
    np.random.set_state(numpys)
    torch.set_rng_state(cpu)
    if gpu is not None:
        torch.cuda.set_rng_state(gpu)
