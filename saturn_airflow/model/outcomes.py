"""What became of a job in a sweep. Plain data, handed on as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from saturn_airflow.model import formats
from saturn_airflow.model.entries import PlanEntry
from saturn_airflow.model.metrics import LOSSES
from saturn_airflow.model.refusals import RefusedStrategy
from saturn_airflow.model.status import Status

OUTCOME = "an outcome"


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The strategy and the place that the plan gave the job.

    :param planned_seconds: how long it was to take there.
    :param kind: of its devices.
    """

    technique: str
    devices: int
    planned_seconds: float
    kind: str = "gpu"
    node: str = ""
    device_ids: tuple[int, ...] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: str = ""


@dataclass(frozen=True, kw_only=True)
class TimeOnDevices:
    """When the job had its devices, over all its runs.

    :param started_at: seconds since the epoch, like ``ended_at``.
    :param actual_seconds: for how long it held them in all.
    :param before_seconds: of them, until its ranks were launched for the last time: launching them, and
        before that the guard, and tries that came to nothing; None where nobody noted it.
    """

    started_at: float
    ended_at: float
    actual_seconds: float
    before_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class TrainedSpeed:
    """How fast Saturn's loop trained the job in its last run.

    :param batches: global batches of that run.
    :param batches_per_epoch: 0 where the data does not say.
    :param spread: the interquartile range of the seconds of a batch, as a share of their median.
    :param ready_seconds: until the ranks were there; ``setup_seconds`` counts from then on.
    :param evaluation_seconds: of one evaluation.
    """

    batches: int
    seconds_per_batch: float
    batches_per_epoch: int = 0
    spread: float = 0.0
    ready_seconds: float = 0.0
    setup_seconds: float = 0.0
    evaluation_seconds: float = 0.0
    peak_device_bytes: int = 0
    peak_host_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a job ended, with what is known of its training.

    As JSON it is flat: the fields of its parts stand beside its own, and what is not known is left out.

    :param reason: why it is not finished, or ended before its last epoch.
    :param attempt: when the plan was made that it belongs to, in seconds since the epoch.
    :param round: the round, in a sweep with rounds.
    :param training: how often the job was begun from scratch, this training included.
    :param planned: None for a job that had no place in the plan.
    :param held: None where it never had its devices.
    :param speed: None where Saturn's own loop did not train it.
    :param steps: optimizer steps in all.
    :param metrics: the last values of the job's own metrics.
    :param checkpoint: the path of the last.
    :param model: the folder of the exported model.
    :param verdict: what the guard said of the strategy.
    :param own_code: of which code, by :func:`~saturn_airflow.model.guards.own_code`.
    :param refusals: of strategies that it was to be trained under.
    :param mixed: why its result may be that of no one code, or no one data; None where nothing was edited.
    :param more: what else training said.
    """

    job: str
    status: Status
    reason: str | None = None
    attempt: float | None = None
    round: int | None = None
    training: int | None = None
    planned: Planned | None = None
    held: TimeOnDevices | None = None
    speed: TrainedSpeed | None = None
    steps: int | None = None
    loss: float | None = None
    epoch_loss: float | None = None
    eval_loss: float | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: str | None = None
    model: str | None = None
    verdict: str | None = None
    own_code: str | None = None
    refusals: tuple[RefusedStrategy, ...] = ()
    mixed: str | None = None
    run_id: str | None = None
    model_uri: str | None = None
    more: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        entry: PlanEntry,
        status: str,
        reason: str | None = None,
        *,
        result: Mapping[str, Any] | None = None,
        held: Mapping[str, float] | None = None,
        training: int | None = None,
    ) -> Outcome:
        """What became of the job of ``entry``.

        :param result: what its training said at its end.
        :param held: when it had its devices; empty where it never had.
        """
        return cls.from_dict(
            {
                **{f.name: getattr(entry, f.name) for f in dataclasses.fields(Planned)},
                **(result or {}),
                **(held or {}),
                "job": entry.name,
                "status": status,
                "reason": reason,
                "attempt": entry.attempt,
                "round": entry.round,
                "training": training,
            }
        )

    @property
    def in_one_go(self) -> bool:
        """Whether Saturn's own loop trained the job from start to end in one run."""
        return self.status == Status.FINISHED and self.speed is not None and self.speed.batches == self.steps

    def value_of(self, metric: str) -> float | None:
        """The last value of ``metric``; None where there is none that is a number."""
        value = getattr(self, metric) if metric in LOSSES else self.metrics.get(metric)
        return value if isinstance(value, int | float) and math.isfinite(value) else None

    def to_dict(self) -> dict[str, Any]:
        """This outcome as JSON-ready data."""
        parts = [vars(part) for part in (self.planned, self.held, self.speed) if part is not None]
        own = {key: value for key, value in vars(self).items() if key not in _PARTS and value is not None}
        if self.speed is not None:
            own |= {name: getattr(self, name) for name in ("loss", "epoch_loss", "eval_loss", "checkpoint")}
        found: dict[str, Any] = {"reason": self.reason, **self.more}
        for fields in (*parts, own):
            found.update(fields)
        found["status"] = str(self.status)
        if self.refusals:
            found["refusals"] = [refusal.to_dict() for refusal in self.refusals]
        else:
            found.pop("refusals", None)
        if "device_ids" in found:
            found["device_ids"] = list(found["device_ids"])
        return {**formats.stamp(OUTCOME), **found}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Outcome:
        """The outcome that :meth:`to_dict` described; the caller has checked its format."""
        parts: dict[str, Any] = {name: _part(part, data) for name, part in _PART_CLASSES.items()}
        own = {key: value for key, value in formats.known_fields(cls, data).items() if key not in _PARTS}
        own |= {"status": Status(data["status"]), "metrics": dict(data.get("metrics") or {})}
        own["refusals"] = tuple(map(RefusedStrategy.from_dict, data.get("refusals") or ()))
        more = {key: value for key, value in data.items() if key not in _KNOWN}
        return cls(**own, **parts, more=more)


_PART_CLASSES: Mapping[str, type[Any]] = {
    "planned": Planned,
    "held": TimeOnDevices,
    "speed": TrainedSpeed,
}
_PARTS = (*_PART_CLASSES, "more")
_KNOWN = {formats.FORMAT, formats.WRITTEN_BY}.union(
    *({f.name for f in dataclasses.fields(cls)} for cls in (Outcome, Planned, TimeOnDevices, TrainedSpeed))
)


def _part(cls: Any, data: Mapping[str, Any]) -> Any:
    """The part of a flat outcome; None where it lacks what this part can't be without."""
    fields = {key: value for key, value in formats.known_fields(cls, data).items() if value is not None}
    if not all(f.name in fields for f in dataclasses.fields(cls) if _is_needed(f)):
        return None
    if "device_ids" in fields:
        fields["device_ids"] = tuple(fields["device_ids"])
    return cls(**fields)


def _is_needed(f: dataclasses.Field[Any]) -> bool:
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
