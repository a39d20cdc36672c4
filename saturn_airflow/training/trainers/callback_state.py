"""What the callbacks of a ``Trainer`` remember, which its own checkpoints have of a few alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import TrainerCallback

from saturn_airflow.launch import handed_over
from saturn_airflow.model.errors import JobError
from saturn_airflow.training.model_attributes import seen
from saturn_airflow.training.optim import plain_values

Kept = list[list[Any]]


class CallbackState:
    """The attributes of callbacks that are numbers, texts, and lists and mappings of such."""

    def __init__(self, callbacks: Sequence[TrainerCallback]) -> None:
        self._callbacks = list(callbacks)
        self._at_first = [self._others(callback) for callback in self._callbacks]

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
        return [[type(callback).__name__, _plain(callback)] for callback in self._callbacks]

    def set(self, kept: Kept) -> None:
        """Have the callbacks remember again.

        :raises JobError: when there are others by now.
        """
        names = [type(callback).__name__ for callback in self._callbacks]
        if names != [name for name, _ in kept]:
            before = ", ".join(name for name, _ in kept)
            raise JobError(f"the Trainer's callbacks were {before} and are {', '.join(names)}: start anew")
        for callback, (_, values) in zip(self._callbacks, kept, strict=True):
            vars(callback).update(values)

    def _others(self, callback: TrainerCallback) -> dict[str, Any]:
        plain = _plain(callback)
        return {name: seen(value, {}) for name, value in vars(callback).items() if name not in plain}


def _plain(callback: TrainerCallback) -> Mapping[str, Any]:
    found = {}
    for name, value in vars(callback).items():
        try:
            written = json.dumps(value)
            if json.loads(written) == value and handed_over.hidden(written) == written:
                found[name] = value
        except (TypeError, ValueError):
            continue
    return found
