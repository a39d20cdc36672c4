"""An entry of a plan: one job with all that its train task must know. Plain data, handed on as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from saturn_airflow.model import formats
from saturn_airflow.model.jobs import Job

ENTRY = "an entry of a plan"
#: What entries of sweeps without rounds leave out.
_OF_ROUNDS = (
    *("round", "standing", "ends_at", "most_batches", "planned_makespan", "besides_seconds", "goes_on"),
    *("moved_from", "pruned"),
)
_STRATEGIES = ("strategies", "instead")


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """What a job may run under on its node.

    :param verdict: what the guard said of it.
    :param seconds: of the whole training, with ``setup_seconds``, which count again at each launch.
    :param leaves_in: seconds until its devices are free once it is told to leave; None where not known.
    :param version: of the technique.
    :param peak_device_bytes: of one device at most, as measured; 0 where not known.
    """

    technique: str
    devices: int
    parameters: Mapping[str, Any] = field(default_factory=dict)
    verdict: str | None = None
    seconds: float = 0.0
    setup_seconds: float = 0.0
    leaves_in: float | None = None
    version: str = "1"
    peak_device_bytes: int = 0

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Strategy:
        """The strategy that ``dataclasses.asdict`` described."""
        return cls(**formats.known_fields(cls, data))


@dataclass(frozen=True, kw_only=True)
class PlanEntry:
    """A job's place in a plan, the estimate it was planned with, and its part in a round.

    :param start: seconds from the plan's start, like ``end``.
    :param attempt: when the plan was made, in seconds since the epoch; what its outcomes are known by.
    :param position: the entry's place in the plan, in order of start.
    :param after: the jobs that have its devices just before it.
    :param verdict: what the guard said of this strategy.
    :param own_code: what the job's own code was then, by :func:`~saturn_airflow.model.guards.own_code`.
    :param source: where the estimate is from: ``measured``, ``history`` or ``interpolated``.
    :param version: of the technique.
    :param batches: global batches of the whole training; None where nothing says how many.
    :param per_epoch: global batches in one pass over the data; 0 where nothing says how many.
    :param strategies: those it may run under on its node where other sweeps want devices too, the planned one
        among them, and in rounds alone; empty where an earlier version planned.
    :param instead: all others that the planned devices suffice for, where training finds that the planned one
        is refused or needs more memory than a device has.
    :param arrived: when the sweep began, in seconds since the epoch.
    :param alone: seconds that the sweep takes at the least with its cluster to itself.
    :param elsewhere: device-seconds that the sweep's jobs on other nodes need at the least.
    :param deadline: when the sweep is to be done, in seconds since the epoch.
    :param ahead: seconds by which the clock of who planned was ahead of that of the shared folder's disk;
        None where nobody knows.
    :param round: from 1; None in a sweep without rounds.
    :param standing: when the plans of earlier rounds were made that still stand.
    :param ends_at: when the round ends, in seconds since the epoch; None for when all is done.
    :param most_batches: global batches after which the job waits at its rung of the selection.
    :param planned_makespan: seconds that the round's plan takes.
    :param besides_seconds: what of the job's time is neither starting nor batches: evaluations, the end.
    :param goes_on: the priority of the run that this entry follows on.
    :param moved_from: where the job was before, in words.
    :param pruned: why the job was dropped.
    """

    job: Job
    technique: str
    devices: int
    node: str
    device_ids: tuple[int, ...]
    start: float
    end: float
    kind: str
    fingerprint: str
    attempt: float
    position: int
    after: tuple[str, ...] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    verdict: str | None = None
    own_code: str = ""
    seconds_per_batch: float = 0.0
    setup_seconds: float = 0.0
    source: str = "measured"
    version: str = "1"
    batches: int | None = None
    per_epoch: int = 0
    strategies: tuple[Strategy, ...] = ()
    instead: tuple[Strategy, ...] = ()
    arrived: float = 0.0
    alone: float = 0.0
    elsewhere: float = 0.0
    deadline: float | None = None
    ahead: float | None = None
    round: int | None = None
    standing: tuple[float, ...] = ()
    ends_at: float | None = None
    most_batches: int | None = None
    planned_makespan: float | None = None
    besides_seconds: float = 0.0
    goes_on: tuple[float, int] | None = None
    moved_from: str | None = None
    pruned: str | None = None

    @property
    def name(self) -> str:
        """The job's name."""
        return self.job.name

    @property
    def planned_seconds(self) -> float:
        """How long the job takes by the plan."""
        return self.end - self.start

    def version_of(self, technique: str, devices: int) -> str:
        """The version of a technique that the job was trained under, though it may not be the planned one."""
        if (technique, devices) == (self.technique, self.devices):
            return self.version
        others = (*self.strategies, *self.instead)
        return next((s.version for s in others if (s.technique, s.devices) == (technique, devices)), "1")

    @property
    def priority(self) -> tuple[float, int]:
        """Of the run that trains it: smaller goes first where devices are waited for."""
        return self.attempt, self.position

    @property
    def place(self) -> tuple[str, int, str, tuple[int, ...]]:
        """Under what it trains, and where."""
        return self.technique, self.devices, self.node, self.device_ids

    def to_dict(self) -> dict[str, Any]:
        """This entry as JSON-ready data."""
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        if self.round is None:
            found = {key: value for key, value in found.items() if key not in _OF_ROUNDS}
        lists = {key: list(value) for key, value in found.items() if isinstance(value, tuple)}
        own: dict[str, Any] = {
            "name": self.name,
            "job": self.job.to_dict(),
            "parameters": dict(self.parameters),
        }
        for name in _STRATEGIES:
            own[name] = [dataclasses.asdict(strategy) for strategy in getattr(self, name)]
        return {**formats.stamp(ENTRY), **found, **lists, **own}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PlanEntry:
        """The entry that :meth:`to_dict` described; the caller has checked its format."""
        fields = formats.known_fields(cls, data)
        fields["job"] = Job.from_dict(fields["job"])
        for name in ("device_ids", "after", "standing"):
            fields[name] = tuple(fields.get(name) or ())
        for name in _STRATEGIES:
            fields[name] = tuple(map(Strategy.from_dict, fields.get(name) or ()))
        if fields.get("goes_on") is not None:
            made, position = fields["goes_on"]
            fields["goes_on"] = made, position
        return cls(**fields)
