"""The tensors in nested containers, as batches, outputs and arguments of forward passes are."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils import _pytree


def tensors_in(data: Any) -> Iterator[torch.Tensor]:
    """The tensors in mappings, sequences, sets, dataclasses and whatever else torch knows as a container."""
    if isinstance(data, torch.Tensor):
        yield data
        return
    if isinstance(data, Mapping):
        parts: Iterable[Any] = data.values()
    elif isinstance(data, list | tuple | set | deque):
        parts = data
    elif dataclasses.is_dataclass(data) and not isinstance(data, type):
        # One with slots has no attributes besides its fields.
        fields = {field.name: getattr(data, field.name, None) for field in dataclasses.fields(data)}
        parts = {**fields, **getattr(data, "__dict__", {})}.values()
    else:
        parts = [leaf for leaf in _pytree.tree_leaves(data) if leaf is not data]
    for part in parts:
        yield from tensors_in(part)


def map_tensors(function: Callable[[torch.Tensor], Any], data: Any) -> Any:
    """``data`` with ``function`` applied to each tensor in its mappings, sequences and dataclasses."""
    return map_parts(lambda path, part: function(part) if isinstance(part, torch.Tensor) else part, data)


def copied(data: Any) -> Any:
    """``data`` with copies of its tensors, which may be written into."""
    return map_tensors(torch.clone, data)


def map_parts(
    function: Callable[[tuple[Any, ...], Any], Any],
    data: Any,
    path: tuple[Any, ...] = (),
    stop: Callable[[tuple[Any, ...]], bool] = lambda path: False,
) -> Any:
    """``data`` with ``function(path, part)`` in the place of all that is no container.

    :param path: where ``data`` lies: the keys, positions and field names that lead there.
    :param stop: says of the path of a container that it is a part like others.
    """

    def inner(key: Any, value: Any) -> Any:
        return map_parts(function, value, (*path, key), stop)

    if isinstance(data, torch.Tensor) or stop(path):
        return function(path, data)
    if isinstance(data, Mapping):
        return _like(data, {key: inner(key, value) for key, value in data.items()})
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*map(inner, data._fields, data))
    if isinstance(data, list | tuple):
        return type(data)(inner(index, value) for index, value in enumerate(data))
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        changed = copy.copy(data)
        for field in dataclasses.fields(data):
            object.__setattr__(changed, field.name, inner(field.name, getattr(data, field.name)))
        return changed
    return function(path, data)


def _like(mapping: Mapping[Any, Any], values: dict[Any, Any]) -> Mapping[Any, Any]:
    """``values`` as a mapping of the same kind, such as Hugging Face's BatchEncoding, where it is made so."""
    if type(mapping) is dict:
        return values
    try:
        return type(mapping)(values)  # type: ignore[call-arg]
    except TypeError:
        return values
