"""What an optimizer keeps in its parameter groups, besides the parameters: counters, sums, estimates.

It is whatever is not as the job's hyper-parameters made it, apart from what the learning-rate scheduler
writes: that follows from the number of steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from saturn_airflow.model.errors import JobError
from saturn_airflow.training.optim import plain_values

Values = list[dict[str, Any]]

_MISSING = object()


class GroupState:
    """The state in the groups of ``optimizer``, which has just been made."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._given = self._now()
        self._expected = self._now()
        self._otherwise: dict[str, tuple[Any, Any]] = {}
        self._parameters = self._ids()
        self._scheduled: list[set[str]] = [set() for _ in self._given]

    def refuse_other_parameters(self) -> None:
        """Check that the groups have the parameters that they were made with.

        :raises JobError: where they have others, which the optimizer of a resumed job would not have.
        """
        if self._ids() != self._parameters:
            name = type(self._optimizer).__name__
            raise JobError(
                f"training has given {name} other parameters than it was made with, as add_param_group does: "
                "a job that is resumed would not train them. Give it all groups when it is made; it leaves "
                "alone what has no gradient, as where requires_grad is False"
            )

    def scheduled(self, change: Callable[[], Any]) -> None:
        """Call ``change``, which is the scheduler's: what it writes is no state of the optimizer."""
        before = self._now()
        change()
        groups = zip(self._scheduled, before, self._now(), self._expected, strict=True)
        for keys, then, now, expected in groups:
            written = [key for key in now if not _same(now, then, key)]
            keys.update(written)
            for key in written:
                # A schedule may follow from what it finds.
                if key in expected and not _same(then, expected, key):
                    self._otherwise.setdefault(key, (expected[key], then.get(key)))
                expected[key] = now[key]

    def expected(self) -> Values:
        """The options of each group as they were made, but for what the scheduler wrote and :meth:`set` put
        there: what else changes them is not the job's."""
        return [dict(values) for values in self._expected]

    def otherwise(self) -> dict[str, tuple[Any, Any]]:
        """What differs from :meth:`expected`, or did when the scheduler wrote last: how it should be, and how
        it is."""
        found = dict(self._otherwise)
        for now, expected in zip(self._now(), self._expected, strict=True):
            for key, value in expected.items():
                if not _same(now, expected, key):
                    found.setdefault(key, (value, now.get(key)))
        return found

    def schedule(self) -> Values:
        """What the scheduler wrote last, JSON-ready, of each group."""
        groups = zip(self._now(), self._scheduled, strict=True)
        return [{key: _encoded(key, now[key]) for key in sorted(keys)} for now, keys in groups]

    def values(self) -> Values:
        """The state, JSON-ready, of each group; nothing of a group that has no parameters here.

        :raises JobError: when something is kept that JSON can't hold.
        """
        state: Values = []
        groups = zip(self._optimizer.param_groups, self._now(), self._given, self._scheduled, strict=True)
        for group, now, given, scheduled in groups:
            keys = [key for key in now if key not in scheduled and not _same(now, given, key)]
            state.append({key: _encoded(key, now[key]) for key in keys if group["params"]})
        return state

    def set(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Continue with what :meth:`values` told."""
        groups = zip(self._optimizer.param_groups, state, self._expected, strict=True)
        for group, values, expected in groups:
            for key, value in values.items():
                group[key] = _like(plain_values.decode(value), group.get(key))
                expected[key] = _copy(group[key])

    def _ids(self) -> list[list[int]]:
        return [list(map(id, group["params"])) for group in self._optimizer.param_groups]

    def _now(self) -> Values:
        return [
            {key: _copy(value) for key, value in group.items() if key != "params"}
            for group in self._optimizer.param_groups
        ]


def merged(parts: Sequence[Values]) -> Values:
    """The state of each group, from the ranks' parts: the first that has any."""
    return [next((values for values in group if values), {}) for group in zip(*parts, strict=True)]


def _same(one: Mapping[str, Any], other: Mapping[str, Any], key: str) -> bool:
    return plain_values.equal(one.get(key, _MISSING), other.get(key, _MISSING))


def _encoded(key: str, value: Any) -> Any:
    return plain_values.encode(value, f"what the optimizer keeps in its groups as {key!r}")


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return copy.deepcopy(value) if isinstance(value, list | dict) else value


def _like(value: Any, current: Any) -> Any:
    """``value`` on the device of the tensor that is there now."""
    both = isinstance(value, torch.Tensor) and isinstance(current, torch.Tensor)
    return value.to(current.device) if both else value
