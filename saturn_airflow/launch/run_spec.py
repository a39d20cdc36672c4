"""What is asked of a run, as plain data that fits in JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from saturn_airflow.launch import host_memory
from saturn_airflow.launch.request import Measure, TrainingSpec
from saturn_airflow.model import formats, json_text
from saturn_airflow.model.claims import Claim
from saturn_airflow.model.definition import Definition
from saturn_airflow.model.entries import Strategy
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.jobs import Job

_SPEC = "a run's spec"


@dataclass(frozen=True, kw_only=True)
class RunSpec(TrainingSpec):
    """What a run does besides what is trained, where, and on which devices. Plain data that fits in JSON.

    :param node: the name of the node this machine is.
    :param slots: how many devices the node has; CPU threads are split among them.
    :param devices: how many devices the job takes.
    :param device_ids: exactly these; None for any that are free.
    :param kind: ``"cpu"`` for CPU slots, else a type of GPU.
    :param priority: smaller goes first where devices are waited for: when the plan was made (seconds since
        the epoch), place in the plan.
    :param holder: who holds the devices, in words for people.
    :param mode: ``"train"``, ``"trial"`` to measure, or ``"score"`` to evaluate the weights that there are.
    :param leases_folder: where the node's device locks are; None for the node's default.
    :param technique_folders: folders of the user's techniques.
    :param path: folders of the user's modules, put at the end of the module search path.
    :param measure: how a trial measures.
    :param verdict: what the guard said of this strategy and job, if it was asked; else it is asked first.
    :param own_code: of which code ``verdict`` is, by :func:`~saturn_airflow.model.guards.own_code`; empty
        where nobody knows. Of other code the guard is asked anew.
    :param version: of which version of the technique it is; likewise.
    :param total_batches: global batches of the whole training, where whoever planned it knows, and
    :param batches_per_epoch: of one pass over the data.
    :param trial_seconds: how long a trial may take, once it has its devices; what comes before the
        end of a measurement's first batch is not counted, see :class:`TrialClock`.
    :param hang_seconds: training in which nothing moved for this long is ended.
    :param most_seconds: how long a training may have its devices; then it writes a checkpoint and ends as
        ``timed_out``.
    :param stop_seconds: how long training may take to stop when asked to.
    :param outlive_seconds: how long the run goes on when nobody follows it; 0 ends it with its starter.
    :param try_number: which try of the task started it, from 1.
    :param definition: by default that of ``job``.
    :param plain_steps_folder: where trials of a sweep leave the guard's plain steps for each other; empty for
        nowhere.
    :param claim: what others who want the node's devices are told of the job or trial, by which turns are
        decided; None where it waits behind those who came before it.
    :param strategies: what the job may run under where others want devices too; ``technique`` and ``devices``
        are the planned.
    :param warnings: what the user is to be told first.
    :param host_memory: how much of the machine's memory its processes may use together: an amount, or a
        part of what the machine has; ``"0"`` for all they want.
    :param home: Saturn's, whose ledger says what remains of the sweep; empty for none.
    """

    node: str
    slots: int
    devices: int
    device_ids: tuple[int, ...] | None = None
    kind: str = "gpu"
    priority: tuple[float, int] = (0.0, 0)
    holder: str = ""
    mode: Literal["train", "trial", "score"] = "train"
    leases_folder: str | None = None
    technique_folders: tuple[str, ...] = ()
    path: tuple[str, ...] = ()
    measure: Measure = field(default_factory=Measure)
    verdict: str | None = None
    own_code: str = ""
    version: str = ""
    total_batches: int | None = None
    batches_per_epoch: int | None = None
    trial_seconds: float = 120.0
    hang_seconds: float = 1800.0
    most_seconds: float | None = None
    stop_seconds: float = 60.0
    outlive_seconds: float = 0.0
    try_number: int = 1
    plain_steps_folder: str = ""
    claim: Claim | None = None
    strategies: tuple[Strategy, ...] = ()
    warnings: tuple[str, ...] = ()
    host_memory: str = host_memory.DEFAULT
    home: str = ""

    def __post_init__(self) -> None:
        what = f"job {self.job.name!r}"
        if not 1 <= self.devices <= self.slots:
            raise InvalidSweepError(
                f"{what} asks for {self.devices} devices; node {self.node!r} has {self.slots}"
            )
        ids = self.device_ids
        if ids is not None and (len(set(ids)) != self.devices or not all(0 <= i < self.slots for i in ids)):
            raise InvalidSweepError(
                f"{what}: device ids {list(ids)} are not {self.devices} of the {self.slots} "
                f"of node {self.node!r}"
            )
        if not self.holder:
            object.__setattr__(self, "holder", what)
        if not self.definition:
            object.__setattr__(self, "definition", Definition.of(self.job).to_dict())

    @property
    def all_batches(self) -> int | None:
        """Global batches of the whole training; None where nobody knows."""
        batches = self.job.hparams.batches
        return self.total_batches if batches is None else batches

    def to_dict(self) -> dict[str, Any]:
        """This spec as JSON-ready data."""
        own: dict[str, Any] = {"measure": self.measure._asdict(), "job": self.job.to_dict()}
        own["alike"] = [job.to_dict() for job in self.alike]
        own["claim"] = None if self.claim is None else self.claim.to_dict()
        return {**formats.stamp(_SPEC), **asdict(replace(self, alike=(), claim=None)), **own}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RunSpec:
        """The spec that :meth:`to_dict` described; the caller has checked its format."""
        fields = formats.known_fields(cls, data)
        fields["job"] = Job.from_dict(fields["job"])
        fields["alike"] = tuple(map(Job.from_dict, fields.get("alike", ())))
        claim = fields.get("claim")
        fields["claim"] = None if claim is None else Claim.from_dict(claim)
        fields["strategies"] = tuple(map(Strategy.from_dict, fields.get("strategies", ())))
        fields["measure"] = _measure(fields.get("measure", {}))
        for name in ("priority", "technique_folders", "path", "warnings"):
            if name in fields:
                fields[name] = tuple(fields[name])
        if fields.get("device_ids") is not None:
            fields["device_ids"] = tuple(fields["device_ids"])
        return cls(**fields)


def _measure(data: Any) -> Measure:
    """A measure from its fields by name; by place, as format 1 had it."""
    if not isinstance(data, Mapping):
        return Measure(*data[: len(Measure._fields)])
    return Measure(**{name: value for name, value in data.items() if name in Measure._fields})


def read_spec(folder: Path) -> RunSpec:
    """What was asked of the run in ``folder``.

    :raises NewerFormatError: when a newer version wrote it in a way that this one can't read.
    :raises InvalidSweepError: when the file is damaged.
    """
    path = folder / "spec.json"
    try:
        data = json_text.parse(path.read_text())
        formats.check(data, _SPEC, path)
        return RunSpec.from_dict(data)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidSweepError(
            f"{path} is damaged ({type(error).__name__}: {error}); move {folder.name} out of "
            f"{folder.parent}, and the job goes on from its last checkpoint"
        ) from None
