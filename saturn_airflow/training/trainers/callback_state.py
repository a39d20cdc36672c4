"""What the callbacks of a ``Trainer`` remember, which its own checkpoints have of a few alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from transformers import Trainer, TrainerCallback

from saturn_airflow.launch import handed_over
from saturn_airflow.model.errors import JobError
from saturn_airflow.training.model_attributes import seen
from saturn_airflow.training.optim import plain_values

Kept = list[list[Any]]


class CallbackState:
    """The attributes of callbacks that are numbers, texts, and lists and mappings of such."""

    def __init__(self, callbacks: Sequence[TrainerCallback]) -> None:
        self._callbacks = list(callbacks)
        self.begin()
        self._at_first = [self._others(callback) for callback in self._callbacks]

    def begin(self) -> None:
        """See what is there as training begins: counters and other mappings are kept where a resumed training
        has some to fill again."""
        self._there = {
            (id(callback), name): type(value)
            for callback in self._callbacks
            for name, value in vars(callback).items()
        }

    def values(self) -> Kept:
        """JSON-ready.

        :raises JobError: when a callback changes what can't be kept.
        """
        for callback, before in zip(self._callbacks, self._at_first, strict=True):
            for name, value in self._others(callback).items():
                if not plain_values.equal(before.get(name), value):
                    raise JobError(
                        f"the callback {type(callback).__name__} changes its {name!r} while it trains, and "
                        "no checkpoint would have it; keep numbers, texts, or lists of such"
                    )
        return [[type(callback).__name__, self._plain(callback)] for callback in self._callbacks]

    def set(self, kept: Kept) -> None:
        """Have the callbacks remember again.

        :raises JobError: when there are others by now.
        """
        names = [type(callback).__name__ for callback in self._callbacks]
        if names != [name for name, _ in kept]:
            before = ", ".join(name for name, _ in kept)
            raise JobError(f"the Trainer's callbacks were {before} and are {', '.join(names)}: start anew")
        for callback, (_, values) in zip(self._callbacks, kept, strict=True):
            for name, value in values.items():
                _put(vars(callback), name, value)

    def _others(self, callback: TrainerCallback) -> dict[str, Any]:
        plain = self._plain(callback)
        return {
            name: seen(value, {})
            for name, value in vars(callback).items()
            if name not in plain and not isinstance(value, Trainer)  # whose attributes are kept elsewhere
        }

    def _plain(self, callback: TrainerCallback) -> Mapping[str, Any]:
        found = {}
        for name, value in vars(callback).items():
            there = self._there.get((id(callback), name)) is type(value)
            given: Any = dict(value) if there and isinstance(value, dict) else value
            if _is_json(given) and handed_over.hidden(written := json.dumps(given)) == written:
                found[name] = given
        return found


def _put(attributes: dict[str, Any], name: str, value: Any) -> None:
    """Set an attribute; a container that is there stays, since others may refer to it."""
    there = attributes.get(name)
    if isinstance(there, dict) and type(value) is dict:
        there.clear()
        there.update(value)
    elif type(there) is type(value) is list:
        there[:] = value
    else:
        attributes[name] = value


def _is_json(value: Any) -> bool:
    """Whether JSON gives back the same: of other containers and of enumerations it gives others."""
    if type(value) is dict:
        return all(type(key) is str for key in value) and all(map(_is_json, value.values()))
    if type(value) is list:
        return all(map(_is_json, value))
    is_scalar = isinstance(value, bool | int | float | str) and not isinstance(value, Enum)
    return value is None or (is_scalar and value == value)
