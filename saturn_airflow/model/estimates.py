"""What is to be measured, and what is known of how fast a job runs under a strategy."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from saturn_airflow.model import formats
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.jobs import Job

Source = Literal["measured", "history", "interpolated"]
#: How the reason of whatever ran out of memory begins.
OUT_OF_MEMORY = "out of memory"
#: The same of what hung before any technique did anything: the job's own steps, as a plain loop takes them.
HUNG_ALONE = "the first steps, by themselves on one device, were not done"

_NAMES = ("fingerprint", "technique", "kind", "version", "reason", "source", "stale")


class Key(NamedTuple):
    """What there is an estimate of: jobs of one fingerprint under one strategy on one kind of device."""

    fingerprint: str
    technique: str
    devices: int
    kind: str


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One short measured run of one job under one technique on a number of devices.

    :param job: the job that is run, standing for all that share its fingerprint.
    :param covers: names of all jobs this trial speaks for, ``job`` among them.
    :param fingerprint: what decides the job's speed; jobs with one fingerprint share their trials.
    :param version: of the technique.
    """

    job: Job
    technique: str
    devices: int
    node: str
    covers: tuple[str, ...]
    fingerprint: str
    version: str = "1"

    def to_dict(self) -> dict[str, Any]:
        """This trial as JSON-ready data."""
        return {
            "job": self.job.to_dict(),
            "technique": self.technique,
            "devices": self.devices,
            "node": self.node,
            "covers": list(self.covers),
            "fingerprint": self.fingerprint,
            "version": self.version,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Trial:
        """The trial that :meth:`to_dict` described."""
        fields = formats.known_fields(cls, data)
        return cls(**{**fields, "job": Job.from_dict(data["job"]), "covers": tuple(data["covers"])})


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What is known of (job, technique, number of devices, kind of device).

    Either ``reason`` says why the strategy can't run, or the seconds are given.

    :param fingerprint: of the jobs this estimate holds for.
    :param version: of the technique.
    :param parameters: what the technique's ``search`` chose.
    :param launch_seconds: from having the devices to launching the ranks.
    :param setup_seconds: from launching the ranks to the first batch, and what the first batches take longer
        than the others.
    :param seconds_per_batch: mean seconds of one global batch, after the first two.
    :param evaluation_seconds: of one pass over the evaluation data.
    :param ending_seconds: from the last batch to the end: checkpoint and export; known from training.
    :param spread: interquartile range of the seconds per batch over their median.
    :param uncertainty: how far the seconds per batch may be off, as a share; of what was not measured.
    :param core_share: how much of the cores that are its devices' part of the machine its ranks keep busy
        (0 to 1), by their trial.
    :param besides_seconds: for how long what goes with each run keeps that part busy, by the trials.
    :param batches: global batches measured.
    :param batches_per_epoch: global batches in one pass over the data (0 where the data has no length).
    :param peak_device_bytes: largest memory of one device (one rank's resident memory on CPU slots).
    :param peak_host_bytes: largest resident memory of all ranks together.
    :param reason: why the strategy can't run: out of memory, or the technique's own words.
    :param passing: whether that may be otherwise next time: a trial that hung, was lost or met a bug.
    :param observed_at: when it was last measured or trained, in seconds since the epoch; 0 for just now.
    :param stale: how far training was from what had been expected, if it was far.
    :param verdicts: what the guard said of the jobs with this fingerprint, by their
        :func:`~saturn_airflow.model.guards.mark`; nothing of those it has not looked at.
    """

    fingerprint: str
    technique: str
    devices: int
    kind: str
    version: str = "1"
    parameters: Mapping[str, Any] = field(default_factory=dict)
    launch_seconds: float = 0.0
    setup_seconds: float = 0.0
    seconds_per_batch: float = 0.0
    evaluation_seconds: float = 0.0
    ending_seconds: float = 0.0
    spread: float = 0.0
    uncertainty: float = 0.0
    core_share: float = 0.0
    besides_seconds: float = 0.0
    batches: int = 0
    batches_per_epoch: int = 0
    peak_device_bytes: int = 0
    peak_host_bytes: int = 0
    reason: str | None = None
    passing: bool = False
    source: Source = "measured"
    observed_at: float = 0.0
    stale: str | None = None
    verdicts: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> Key:
        """What this is an estimate of."""
        return Key(self.fingerprint, self.technique, self.devices, self.kind)

    @property
    def works(self) -> bool:
        """Whether the strategy can run."""
        return self.reason is None

    @property
    def out_of_memory(self) -> bool:
        """Whether it can't run for want of memory: on fewer devices it can't either."""
        return self.reason is not None and self.reason.startswith(OUT_OF_MEMORY)

    @property
    def hung_alone(self) -> bool:
        """Whether its trial hung in the plain loop's steps, which those of other techniques begin with."""
        return self.reason is not None and self.reason.startswith(HUNG_ALONE)

    def joined(self, fresh: Estimate) -> Estimate:
        """What this and a fresh measurement of the same say together, weighted by their batches.

        Training says how fast jobs are beside others; a trial might have had the machine to itself.
        """
        if not (self.works and fresh.works) or self.parameters != fresh.parameters:
            return fresh
        weight = max(1, self.batches) / (max(1, self.batches) + max(1, fresh.batches))
        both = ("launch_seconds", "setup_seconds", "seconds_per_batch", "evaluation_seconds")
        means = {name: weight * getattr(self, name) + (1 - weight) * getattr(fresh, name) for name in both}
        batches = self.batches + fresh.batches
        verdicts = {**self.verdicts, **fresh.verdicts}
        # Nothing need be told of neighbours but once.
        means |= {"ending_seconds": self.ending_seconds, "core_share": 0.0, "besides_seconds": 0.0}
        return dataclasses.replace(fresh, **means, batches=batches, verdicts=verdicts)

    def to_dict(self) -> dict[str, Any]:
        """This estimate as JSON-ready data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Estimate:
        """The estimate that :meth:`to_dict` described."""
        return cls(**formats.known_fields(cls, data))

    def check(self) -> None:
        """Raise InvalidSweepError where a value can't be right: others than Saturn may have written it."""
        for one in dataclasses.fields(self):
            value = getattr(self, one.name)
            if one.name in _NAMES:
                right = isinstance(value, str) or (value is None and one.default is None)
            elif isinstance(one.default, bool):
                right = isinstance(value, bool)
            elif one.default_factory is not dataclasses.MISSING:
                right = isinstance(value, Mapping)
            else:
                right = type(value) in (int, float) and math.isfinite(value) and value >= 0
            if not right:
                raise InvalidSweepError(f"an estimate's {one.name} is {value!r:.80}")
        if type(self.devices) is not int or self.devices < 1:
            raise InvalidSweepError(f"an estimate is of {self.devices!r:.80} devices")

    def seconds(self, batches: int) -> float:
        """Seconds that training for ``batches`` global batches will take, from having the devices on.

        On devices that all are busy it takes no less than their part of the machine's cores needs for it and
        for what goes with a run.
        """
        assert self.reason is None
        evaluations = math.ceil(batches / self.batches_per_epoch) if self.batches_per_epoch else 1
        evaluating = evaluations * self.evaluation_seconds
        training = batches * self.seconds_per_batch
        alone = self.launch_seconds + self.setup_seconds + training + evaluating + self.ending_seconds
        return max(alone, self.core_share * alone + self.besides_seconds)
