"""Caches of keys and values, which are for generating: in training they only grow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

# Where caches were on in a model: modules by their names, and what of their configurations, by attributes.
_Place = tuple[str, tuple[str, ...]]
_were_on: WeakKeyDictionary[nn.Module, list[_Place]] = WeakKeyDictionary()


def switch_off(model: nn.Module) -> None:
    """Set ``use_cache`` to False in a Hugging Face model, its parts, and all their configurations.

    Encoders, decoders and the parts of models of several kinds have configurations of their own. A
    ``use_cache`` of other models is theirs, and stays.
    """
    _were_on[model] = [place for place in _places(model) if _switched(model, place, False)]


@contextmanager
def as_given(model: nn.Module, copy: nn.Module) -> Iterator[bool]:
    """``copy`` with the caches that ``model`` had on; yields whether it had any."""
    places = _were_on.get(model, [])
    for place in places:
        _switched(copy, place, True)
    try:
        yield bool(places)
    finally:
        for place in places:
            _switched(copy, place, False)


def _places(model: nn.Module) -> Iterator[_Place]:
    for name, holder in model.named_modules():
        config = getattr(holder, "config", None)
        if _is_config(config):
            yield from ((name, ("config", *path)) for path in _paths(config, set()))
            yield from ((f"{name}.{part}".strip("."), ()) for part, _ in holder.named_modules())


def _switched(model: nn.Module, place: _Place, to: bool) -> bool:
    """Set ``use_cache`` there; whether it was the opposite."""
    name, path = place
    holder: Any = model.get_submodule(name)
    for step in path:
        holder = getattr(holder, step)
    if getattr(holder, "use_cache", None) is not (not to):
        return False
    holder.use_cache = to
    return True


def _paths(config: Any, seen: set[int]) -> Iterator[tuple[str, ...]]:
    """To ``config`` and to those in it, each once."""
    if id(config) not in seen:
        seen.add(id(config))
        yield ()
        for name, value in vars(config).items():
            if _is_config(value):
                yield from ((name, *path) for path in _paths(value, seen))


def _is_config(value: Any) -> bool:
    return hasattr(value, "model_type") and hasattr(value, "to_dict") and hasattr(value, "__dict__")
