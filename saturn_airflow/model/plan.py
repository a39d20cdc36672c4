"""A plan: for each job its strategy, node, devices, start and end."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from saturn_airflow.model import formats


@dataclass(frozen=True)
class Assignment:
    """Where and when one job runs.

    :param devices: how many.
    :param device_ids: their numbers on the node, from 0.
    :param start: seconds from the plan's start, as ``end``.
    """

    job: str
    technique: str
    devices: int
    node: str
    device_ids: tuple[int, ...]
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """How long the job takes."""
        return self.end - self.start

    def to_dict(self) -> dict[str, Any]:
        """This assignment as JSON-ready data."""
        return {**dataclasses.asdict(self), "device_ids": list(self.device_ids)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Assignment:
        """The assignment that :meth:`to_dict` described."""
        return cls(**{**formats.known_fields(cls, data), "device_ids": tuple(data["device_ids"])})


@dataclass(frozen=True)
class Place:
    """Where and how a job runs."""

    technique: str
    devices: int
    node: str
    device_ids: tuple[int, ...]

    @classmethod
    def of(cls, assignment: Assignment) -> Place:
        """The place a plan gives a job."""
        return cls(assignment.technique, assignment.devices, assignment.node, assignment.device_ids)


@dataclass(frozen=True)
class Plan:
    """A valid schedule with a proven bound.

    :param makespan: seconds from the plan's start until the last job ends.
    :param lower_bound: seconds that no plan can be shorter than (for the makespan objective).
    :param seconds: wall time that planning took.
    :param value: for another objective than the makespan, what it comes to: seconds or device-seconds.
    :param value_bound: what it can't be less than.
    """

    name: str
    objective: str
    makespan: float
    lower_bound: float
    seconds: float
    assignments: tuple[Assignment, ...] = field(default_factory=tuple)
    value: float | None = None
    value_bound: float | None = None

    @property
    def gap(self) -> float:
        """How much worse than the best conceivable plan this one may be, as a share: 0 is proven optimal."""
        if self.value is not None and self.value_bound is not None:
            return self.value / self.value_bound - 1 if self.value_bound > 0 else float("inf")
        return self.makespan / self.lower_bound - 1 if self.lower_bound > 0 else float("inf")

    def to_dict(self) -> dict[str, Any]:
        """This plan as JSON-ready data, in the format of plan files."""
        others = {"value": self.value, "value_bound": self.value_bound}
        return {
            "name": self.name,
            "objective": self.objective,
            **{key: value for key, value in others.items() if value is not None},
            "makespan": self.makespan,
            "lower_bound": self.lower_bound,
            "gap": self.gap,
            "seconds": self.seconds,
            "assignments": [a.to_dict() for a in self.assignments],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """The plan that :meth:`to_dict` described."""
        return cls(
            name=data["name"],
            objective=data["objective"],
            makespan=data["makespan"],
            lower_bound=data["lower_bound"],
            seconds=data["seconds"],
            assignments=tuple(Assignment.from_dict(a) for a in data["assignments"]),
            value=data.get("value"),
            value_bound=data.get("value_bound"),
        )
