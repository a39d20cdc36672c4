"""What is to be measured, and what is known of how fast a job runs under a strategy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from saturn_airflow.jobs import Job

Source = Literal["measured", "history", "interpolated"]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One short measured run of one job under one technique on a number of devices.

    :param job: the job that is run, standing for all that share its fingerprint.
    :param covers: names of all jobs this trial speaks for, ``job`` among them.
    :param fingerprint: what decides the job's speed; jobs with one fingerprint share their trials.
    """

    job: Job
    technique: str
    devices: int
    node: str
    covers: tuple[str, ...]
    fingerprint: str

    def to_dict(self) -> dict[str, Any]:
        """This trial as JSON-ready data."""
        return {
            "job": self.job.to_dict(),
            "technique": self.technique,
            "devices": self.devices,
            "node": self.node,
            "covers": list(self.covers),
            "fingerprint": self.fingerprint,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Trial:
        """The trial that :meth:`to_dict` described."""
        return cls(**{**data, "job": Job.from_dict(data["job"]), "covers": tuple(data["covers"])})


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What is known of (job, technique, number of devices, kind of device).

    Either ``reason`` says why the strategy can't run, or the seconds are given.

    :param fingerprint: of the jobs this estimate holds for.
    :param parameters: what the technique's ``search`` chose.
    :param setup_seconds: from launching the ranks to the first batch.
    :param seconds_per_batch: median seconds of one global batch.
    :param spread: interquartile range of the seconds per batch over their median.
    :param batches: global batches measured.
    :param batches_per_epoch: global batches in one pass over the data (0 where the data has no length).
    :param peak_device_bytes: largest memory of one device (one rank's resident memory on CPU slots).
    :param peak_host_bytes: largest resident memory of all ranks together.
    :param reason: why the strategy can't run: out of memory, or the technique's own words.
    :param passing: whether that may be otherwise next time: a trial that hung, was lost or met a bug.
    """

    fingerprint: str
    technique: str
    devices: int
    kind: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    setup_seconds: float = 0.0
    seconds_per_batch: float = 0.0
    spread: float = 0.0
    batches: int = 0
    batches_per_epoch: int = 0
    peak_device_bytes: int = 0
    peak_host_bytes: int = 0
    reason: str | None = None
    passing: bool = False
    source: Source = "measured"

    def to_dict(self) -> dict[str, Any]:
        """This estimate as JSON-ready data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Estimate:
        """The estimate that :meth:`to_dict` described."""
        return cls(**data)

    def seconds(self, batches: int) -> float:
        """Seconds that ``batches`` global batches are expected to take, setting up included."""
        assert self.reason is None
        return self.setup_seconds + batches * self.seconds_per_batch
