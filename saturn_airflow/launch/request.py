"""What is trained and how, and what the ranks are asked to do: plain data that travels to other processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from saturn_airflow.model.errors import JobError
from saturn_airflow.model.jobs import Job


class Measure(NamedTuple):
    """How a trial measures: batches that only warm up, batches that count, and when to stop counting.

    :param seconds: stop before ``batches`` when this long was counted.
    :param least_seconds: go on after ``batches`` until this long was counted, for short batches vary more.
    :param precise_seconds: go on until the mean is known to 2% (its standard error) or this long was counted.
    """

    warmups: int = 2
    batches: int = 5
    seconds: float = 60.0
    least_seconds: float = 0.0
    precise_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TrainingSpec:
    """What is trained, and how: what a run is told, and its ranks each time that it launches them.

    :param technique: its name in the library.
    :param parameters: what :meth:`BaseTechnique.parallelize` gets.
    :param folder: the state of this job in this sweep: ``checkpoints/``, and ``runs/`` with a folder each.
    :param batch_count: global batches to train for; None for all that are left.
    :param checkpoint_seconds: save a checkpoint when the last one is this old; None for never by time.
    :param checkpoint_batches: save a checkpoint every so many global batches; None for never by count.
    :param keep_checkpoints: how many of the newest checkpoints stay.
    :param alike: jobs whose optimizer and schedule a trial tries to make beside those of ``job``; the event
        ``broken`` (job, reason) tells of those for which it can't.
    :param definition: what the job's checkpoints belong to, :meth:`Definition.to_dict`. A checkpoint of
        another definition is refused.
    :param goes_on_from: the hash of another definition whose checkpoints are taken all the same.
    :param initial_weights: the safetensors file that the job's ``init_from`` means; empty where it has none.
    """

    job: Job
    technique: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    folder: str
    batch_count: int | None = None
    checkpoint_seconds: float | None = 60.0
    checkpoint_batches: int | None = None
    keep_checkpoints: int = 2
    alike: tuple[Job, ...] = ()
    definition: Mapping[str, Any] = field(default_factory=dict)
    goes_on_from: str | None = None
    initial_weights: str = ""


@dataclass(frozen=True, kw_only=True)
class TrainRequest(TrainingSpec):
    """One call of :func:`saturn_airflow.training.loop.train`, the same on every rank.

    :param folder: where it is empty nothing is saved.
    :param measure: None to train. For a trial: nothing is written, nothing is loaded, the first
        ``warmups`` batches are not counted, and at most ``batches`` more are timed, fewer (but at least
        one) when ``seconds`` have passed since the first of them began.
    :param here: fetch samples in the ranks themselves, not in workers of the DataLoader, where that makes no
        difference to what they are.
    :param plain_steps: what an earlier call of a guard that takes the same plain steps returned under this
        name; empty to take them anew.
    """

    folder: str = ""
    measure: Measure | None = None
    here: bool = False
    plain_steps: bytes = b""

    @classmethod
    def of(cls, spec: TrainingSpec, **changes: Any) -> TrainRequest:
        """What ``spec`` says, but for ``changes``."""
        said = {one.name: getattr(spec, one.name) for one in fields(TrainingSpec)}
        return cls(**{**said, **changes})

    @property
    def checkpoints(self) -> Path:
        """The folder that holds the checkpoints."""
        return Path(self.folder) / "checkpoints"


class NotANumberError(JobError):
    """The loss is NaN or infinite; the message says at which step."""


class DoesNotFit(Exception):  # noqa: N818 - an answer, not a failure
    """The technique can't train this job on these devices; the message is the reason."""


class ChangesResultError(DoesNotFit):
    """The technique trains the job otherwise than one device does; the message says what differs."""
