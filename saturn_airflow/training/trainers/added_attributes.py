"""Attributes that a job's code adds to the arguments and the state of its ``Trainer``, whose checkpoints lack
them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from transformers import Trainer

from saturn_airflow.model.errors import JobError
from saturn_airflow.training.optim import plain_values
from saturn_airflow.training.trainers.trainer_attributes import set_by_libraries

_OWNERS = ("args", "state", "control")


class AddedAttributes:
    """The attributes as training begins, of which some change while it trains."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._given = {
            owner: {name: plain_values.try_encode(value) for name, value in added.items()}
            for owner, added in self._now().items()
        }

    def values(self) -> dict[str, dict[str, Any]]:
        """What has changed, JSON-ready, but for :meth:`lacking`."""
        kept, _ = self._changed()
        return kept

    def lacking(self) -> list[str]:
        """The names of what has changed and can't be kept."""
        _, lost = self._changed()
        return lost

    def _changed(self) -> tuple[dict[str, dict[str, Any]], list[str]]:
        kept: dict[str, dict[str, Any]] = {}
        lost = []
        for owner, added in self._now().items():
            for name, value in added.items():
                if self._given[owner].get(name) == plain_values.try_encode(value):
                    continue
                try:
                    kept.setdefault(owner, {})[name] = plain_values.encode(value, name)
                except JobError:
                    lost.append(f"{owner}.{name}")
        return {owner: added for owner, added in kept.items() if added}, lost

    def set(self, values: Mapping[str, Mapping[str, Any]]) -> None:
        """Continue with what :meth:`values` told."""
        for owner, added in values.items():
            held = getattr(self._trainer, owner)
            for name, value in added.items():
                setattr(held, name, plain_values.restored(getattr(held, name, None), value))

    def _now(self) -> dict[str, dict[str, Any]]:
        return {owner: _added_to(getattr(self._trainer, owner)) for owner in _OWNERS}


def _added_to(value: Any) -> dict[str, Any]:
    kind: Any = type(value)
    known = {field.name for field in dataclasses.fields(kind)} | set_by_libraries(kind)
    return {
        name: part for name, part in vars(value).items() if name not in known and not name.startswith("_")
    }
