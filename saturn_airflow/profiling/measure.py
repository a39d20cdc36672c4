"""Running one trial."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from saturn_airflow.launch import cores, runs
from saturn_airflow.launch.handed_over import NOTHING, HandedOver
from saturn_airflow.launch.request import Measure
from saturn_airflow.launch.runs import Run, RunSpec
from saturn_airflow.model import guards
from saturn_airflow.model.claims import Claim
from saturn_airflow.model.cluster import Node
from saturn_airflow.model.core_use import CoreUse
from saturn_airflow.model.errors import DiskError, JobError, SaturnError
from saturn_airflow.model.estimates import OUT_OF_MEMORY, Estimate, Trial
from saturn_airflow.model.jobs import Job
from saturn_airflow.model.status import Status
from saturn_airflow.profiling.blame import DoubtfulError

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Seconds for which batches are timed where five are done sooner, and where they vary much.
_LEAST_SECONDS = 0.5
_PRECISE_SECONDS = 3.0
# Ends of a trial that say something of the strategy rather than of the job.
_ANSWERS = (Status.OUT_OF_MEMORY, Status.DOES_NOT_FIT, Status.HUNG, Status.LOST)


class RunSettings(TypedDict, total=False):
    """Settings of a trial's run that mean what they mean in :class:`RunSpec`."""

    holder: str
    priority: tuple[float, int]
    leases_folder: str | None
    technique_folders: tuple[str, ...]
    path: tuple[str, ...]
    host_memory: str
    claim: Claim | None


def measure(
    trial: Trial,
    node: Node,
    *,
    alike: Sequence[Job] = (),
    on_broken: Callable[[str, str], object] = lambda job, reason: None,
    on_use: Callable[[CoreUse], object] = lambda use: None,
    folder: str | Path,
    plain_steps: str | Path = "",
    weights: str = "",
    handed: HandedOver = NOTHING,
    how: Measure | None = None,
    seconds: float = 120.0,
    log: Callable[[str], object] = lambda line: None,
    **run_settings: Unpack[RunSettings],
) -> Estimate:
    """Run ``trial`` on any free devices of ``node``, which is this machine, and say what it found.

    That it ran out of memory, took too long, or that the technique failed, is an answer: the estimate then
    has a reason.

    :param alike: jobs that share the trial, whose optimizers and schedules are looked at in passing.
    :param on_broken: called with the name of each of them that can't have its own, and the reason.
    :param on_use: called with what this machine's cores did meanwhile, where that can be told.
    :param folder: for the trial's files.
    :param plain_steps: the folder in which trials of a sweep leave the guard's plain steps for each other.
    :param weights: the file that the job's ``init_from`` means.
    :param handed: secrets for its processes.
    :param how: what to count; where not given two batches to warm up, then five or half a second of them, and
        up to three seconds where they vary.
    :param seconds: how long the trial may take once it has its devices.
    :param log: called with lines for the task's log.
    :param run_settings: what any run is told, see :class:`RunSettings`.
    :raises JobError: when the job's own code raises or its loss is not a number; the message ends with the
        user's traceback. Its ``common`` says whether jobs that differ in nothing but what the optimizer sees
        would fail alike.
    :raises DiskError: when this machine's disk is full or fails.
    :raises DoubtfulError: when the technique failed after the optimizer's first step.
    :raises SaturnError: when the trial was stopped, or this machine lacks the devices the node should have.
    """
    spec = RunSpec(
        mode="trial",
        job=trial.job,
        technique=trial.technique,
        node=node.name,
        kind=node.kind,
        slots=node.devices,
        devices=trial.devices,
        folder=str(folder),
        initial_weights=weights,
        plain_steps_folder=str(plain_steps),
        measure=how or Measure(least_seconds=_LEAST_SECONDS, precise_seconds=_PRECISE_SECONDS),
        alike=tuple(alike),
        trial_seconds=seconds,
        **run_settings,
    )
    return _followed(runs.start(spec, handed), trial, node, log, on_broken, on_use)


class _TrialEnd(NamedTuple):
    """How a trial ended.

    :param end: its last event.
    :param stepped: whether the optimizer had stepped since the ranks were launched last.
    :param occupied: whether others use the memory of its devices.
    """

    end: Mapping[str, Any]
    stepped: bool
    occupied: bool


def _followed(
    run: Run,
    trial: Trial,
    node: Node,
    log: Callable[[str], object],
    on_broken: Callable[[str, str], object],
    on_use: Callable[[CoreUse], object],
) -> Estimate:
    """What ``run`` found, once it has ended."""
    # The node's server is there by now: its start is none of what goes with each trial.
    before = cores.worked()
    try:
        trial_end = _follow(run, log, on_broken)
        estimate = _estimate(trial, node.kind, trial_end)
        estimate.check()
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise SaturnError(
            f"what the trial of {trial.job.name!r} under {trial.technique} said in {run.folder} is damaged "
            f"({type(error).__name__}: {error}); a retry measures anew"
        ) from error
    finally:
        # Whoever leaves early, an Airflow task that is killed too, leaves no ranks behind.
        run.kill()
    if (use := _core_use(node, before, trial_end.end)) is not None:
        on_use(use)
    return estimate


def _core_use(node: Node, before: cores.Worked | None, end: Mapping[str, Any]) -> CoreUse | None:
    """What the machine's cores did since ``before``; None where that or the run's part is not told."""
    of_run, now = end.get("cpu_seconds"), cores.worked()
    if of_run is None or before is None or now is None or now.cores != before.cores:
        return None
    return CoreUse(
        node=node.name,
        machine=now.machine,
        cores=now.cores,
        began=before.at,
        ended=now.at,
        busy_before=before.seconds,
        busy_after=now.seconds,
        of_run=float(of_run),
        of_rank=float(end["result"].get("busy_cores", 0.0)),
    )


def _follow(run: Run, log: Callable[[str], object], on_broken: Callable[[str, str], object]) -> _TrialEnd:
    """Follow the trial's events to its end."""
    end: Mapping[str, Any] = {}
    stepped = occupied = False
    for event in run.events():
        if event["event"] == "waiting":
            log(f"Waiting for devices held by {'; '.join(event['for'])}")
        elif event["event"] == "measured" and event["parameters"]:
            log(f"{event['parameters']}: {event['seconds_per_batch']:.4f} s per batch")
        elif event["event"] == "guard":
            log(f"Compared with one device in {event['seconds']:.1f} s: {event['verdict']}")
        elif event["event"] == "warning":
            log(event["message"])
            occupied = occupied or bool(event.get("occupied"))
        elif event["event"] in ("launched", "step"):
            stepped = event["event"] == "step"
        elif event["event"] == "broken":
            on_broken(event["job"], event["reason"])
        elif event["event"] == "end" and event["status"] == Status.HUNG and event["traceback"]:
            log(f"It hung here: {event['traceback']}")
        end = event
    return _TrialEnd(end, stepped, occupied)


def _estimate(trial: Trial, kind: str, trial_end: _TrialEnd) -> Estimate:
    """The estimate that a trial's end comes to; raises what :func:`measure` does."""
    end = trial_end.end
    key: dict[str, Any] = {
        "fingerprint": trial.fingerprint,
        "technique": trial.technique,
        "devices": trial.devices,
        "kind": kind,
        "version": trial.version,
    }
    status, reason = end["status"], end["reason"]
    if status == Status.CHANGES_RESULT:
        refused = {guards.mark(trial.job, trial.version): guards.refused(reason)}
        return Estimate(**key, reason=reason, verdicts=refused)
    if status == Status.FINISHED:
        found = dict(end["result"])
        found.pop("busy_cores", None)
        return Estimate(**key, launch_seconds=found.pop("ready_seconds"), **found)
    if end.get("whose") == "node":
        raise DiskError(f"the trial of {trial.job.name!r} under {trial.technique} was not run: {reason}")
    told = "\n".join(filter(None, [reason, end["traceback"]]))
    if status == Status.NOT_A_NUMBER or end.get("whose") == "job":
        error = JobError(told)
        error.common = bool(end.get("common"))
        raise error
    if status == Status.OUT_OF_MEMORY:
        # What others left of a GPU's memory tonight says nothing about another night.
        return Estimate(**key, reason=f"{OUT_OF_MEMORY} ({reason})", passing=trial_end.occupied)
    if status in _ANSWERS:
        return Estimate(**key, reason=reason, passing=status in (Status.HUNG, Status.LOST))
    if end.get("whose") == "technique":
        failed = Estimate(**key, reason=f"technique {trial.technique!r} failed: {told}", passing=True)
        if trial_end.stepped:
            raise DoubtfulError(failed)
        return failed
    raise SaturnError(f"the trial of {trial.job.name!r} under {trial.technique} was not run: {told}")
