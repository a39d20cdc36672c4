"""What a machine's cores did while a trial ran on it, and what that says of jobs that run side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from saturn_airflow.model import formats


@dataclass(frozen=True, kw_only=True)
class CoreUse:
    """One trial's.

    :param node: on which it ran.
    :param machine: which one that is, until it is started anew.
    :param cores: numbers of the cores that the node's processes may use.
    :param began: when the trial's run was started, in seconds on the machine's own clock.
    :param ended: when its task had nothing left to do but to tell.
    :param busy_before: seconds that the cores together had worked until ``began``, since the machine runs.
    :param busy_after: the same until ``ended``.
    :param of_run: how many of these seconds the trial's ranks worked.
    :param of_rank: cores that each rank kept busy while it trained; 0 where it did not tell.
    """

    node: str
    machine: str
    cores: tuple[int, ...]
    began: float
    ended: float
    busy_before: float
    busy_after: float
    of_run: float
    of_rank: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """This as JSON-ready data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CoreUse:
        """What :meth:`to_dict` described."""
        fields = formats.known_fields(cls, data)
        return cls(**{**fields, "cores": tuple(data["cores"])})


def seconds_besides(uses: Sequence[CoreUse]) -> float:
    """Seconds for which the cores of one machine worked for each of these trials, besides its ranks: the
    Airflow tasks, what follows and starts runs, and whatever else was at work there."""
    worked, last = 0.0, None
    for use in sorted(uses, key=lambda use: use.began):
        if last is None or use.began > last.ended:
            worked += use.busy_after - use.busy_before
            last = use
        elif use.ended > last.ended:
            worked += use.busy_after - last.busy_after
            last = use
    return max(0.0, worked - sum(use.of_run for use in uses)) / len(uses) if uses else 0.0
