"""Caches of keys and values, which are for generating: in training they only grow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn


def switch_off(model: nn.Module) -> None:
    """Set ``use_cache`` to False in a Hugging Face model, its parts, and all their configurations.

    Encoders, decoders and the parts of models of several kinds have configurations of their own. A
    ``use_cache`` of other models is theirs, and stays.
    """
    for holder in model.modules():
        config = getattr(holder, "config", None)
        if not _is_config(config):
            continue
        for one in _configs(config, set()):
            _switch_off(one)
        for module in holder.modules():
            _switch_off(module)


def _switch_off(holder: Any) -> None:
    if getattr(holder, "use_cache", None) is True:
        holder.use_cache = False


def _configs(config: Any, seen: set[int]) -> Iterator[Any]:
    """``config`` and those in it, each once."""
    if id(config) not in seen:
        seen.add(id(config))
        yield config
        for value in vars(config).values():
            if _is_config(value):
                yield from _configs(value, seen)


def _is_config(value: Any) -> bool:
    return hasattr(value, "model_type") and hasattr(value, "to_dict") and hasattr(value, "__dict__")
