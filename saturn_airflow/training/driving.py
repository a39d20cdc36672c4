"""Calling a technique: what the process between a run's supervisor and its ranks does."""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from saturn_airflow import library
from saturn_airflow.launch import failures, job_log
from saturn_airflow.launch.failures import RanksFailedError
from saturn_airflow.launch.launching import Link
from saturn_airflow.launch.request import ChangesResultError, DoesNotFit
from saturn_airflow.launch.run_spec import RunSpec
from saturn_airflow.model import disks, guards
from saturn_airflow.model.arguments import json_mapping
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.status import Status
from saturn_airflow.training.guarding.verdicts import Verdicts, verdict_key
from saturn_airflow.training.session import MODEL, Session

_SCORE = "saturn_airflow.training.loop:score"


def drive(
    link: Link,
    spec_data: Mapping[str, Any],
    device_ids: Sequence[int],
    deadline: float,
    export_apart: Callable[[str], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Call the technique: what the process between the supervisor and the ranks does.

    It is a process of its own where a technique is not Saturn's: its ``search`` and ``execute`` may do
    anything.

    :param export_apart: :func:`export` with a checkpoint, in another process; None to call what a job names
        in this one.
    """
    spec = RunSpec.from_dict(spec_data)
    if export_apart is None:
        job_log.redirect(link.emit, first=True)
    session = Session(link, spec, deadline)
    try:
        technique = library.get(spec.technique)
    except InvalidSweepError as error:
        failure = replace(failures.describe(error), whose="technique")
        raise RanksFailedError(failure) from None
    if reason := technique.why_not_initial_weights(spec.job):
        raise DoesNotFit(reason)
    if spec.mode == "score":
        return dict(session.launch(_SCORE, session.request(spec.parameters, None))[0])
    if spec.mode == "train":
        own_code = guards.own_code(spec.job)
        verdict = _verdict_before_training(
            session, _of_this_code(spec, own_code, technique, session), technique
        )
        if technique.trains_by_itself:  # of an earlier run, which was stopped
            shutil.rmtree(session.folder / MODEL, ignore_errors=True)
        if not (technique.trains_by_itself and spec.batch_count == 0):  # nothing is left to be trained
            with _remembering_refusals(session, spec, technique):
                technique.execute(spec.job, device_ids, session, spec.parameters, spec.batch_count)
        said = {"verdict": verdict, "own_code": own_code}
        return {**session.result, **said, **_exported(session, spec, export_apart)}
    reason = library.why_not(technique, spec.job, len(device_ids))
    if reason is not None:
        raise DoesNotFit(reason)
    parameters, seconds = _checked(technique.search(spec.job, device_ids, session), spec.technique)
    verdicts = session.verdicts(parameters)
    return {
        "parameters": parameters,
        "seconds_per_batch": seconds,
        "verdicts": verdicts,
        **(session.measured(parameters) or session.length_of_data()),
    }


def _of_this_code(
    spec: RunSpec, own_code: str, technique: library.BaseTechnique, session: Session
) -> RunSpec:
    """``spec`` without a verdict that is of other code, of the job's or of the technique's."""
    of_code, of_version = spec.own_code in ("", own_code), spec.version in ("", technique.version)
    if spec.verdict is None or (of_code and of_version):
        return spec
    whose = "the job's code" if not of_code else f"technique {spec.technique!r}"
    session.emit(
        "warning",
        message=f"{whose} is another than when this was planned: the guard compares first steps anew",
    )
    return replace(spec, verdict=None)


def _verdict_before_training(session: Session, spec: RunSpec, technique: library.BaseTechnique) -> str:
    """What the guard says of what is to be trained: nothing is trained that it was not asked about.

    :raises RanksFailedError: when it refuses.
    :raises ChangesResultError: when an earlier training was refused.
    """
    known = Verdicts(session.folder)
    if spec.verdict is not None and not known.has_any():  # the key would only take time
        return _allowed(spec, spec.verdict)
    key = verdict_key(spec, technique)
    at_last = known.get(key)
    if at_last is not None and at_last.startswith(guards.REFUSED) and spec.technique not in spec.job.trust:
        raise ChangesResultError(at_last.removeprefix(f"{guards.REFUSED}: "))
    verdict = spec.verdict or at_last
    if verdict is None:
        verdict = session.verdict(spec.parameters)
        known.set(key, verdict)
    return _allowed(spec, verdict)


def _allowed(spec: RunSpec, verdict: str) -> str:
    """``verdict``, where the job may be trained with it."""
    if not guards.allows(spec.job, spec.technique, verdict):
        raise DoesNotFit(
            f"{spec.technique} x {spec.devices} is not exact ({verdict}), as Job(exact=True) wants"
        )
    return verdict


@contextlib.contextmanager
def _remembering_refusals(
    session: Session, spec: RunSpec, technique: library.BaseTechnique
) -> Iterator[None]:
    """Around a training: one that was stopped for what it changes is not begun again."""
    try:
        yield
    except RanksFailedError as error:
        if error.failure.status == Status.CHANGES_RESULT:
            refused = guards.refused(error.failure.reason)
            Verdicts(session.folder).set(verdict_key(spec, technique), refused)
        raise


def _exported(
    session: Session, spec: RunSpec, export_apart: Callable[[str], dict[str, Any]] | None
) -> dict[str, Any]:
    """Write the finished job's model beside its checkpoints."""
    checkpoint, folder = session.result.get("checkpoint"), session.folder / MODEL
    if session.result["status"] != Status.FINISHED:
        return {}
    if checkpoint is None:
        if folder.is_dir():
            return {"model": str(folder)}
        if spec.batch_count is None:  # else it may have more to train
            session.emit(
                "warning",
                message=f"technique {spec.technique!r} left no model, so this job can't be registered: its "
                "execute has to call session.export(model)",
            )
        return {}
    return _export(session, spec, checkpoint) if export_apart is None else export_apart(checkpoint)


def export(link: Link, spec_data: Mapping[str, Any], checkpoint: str) -> dict[str, Any]:
    """Write the model of a finished job's checkpoint beside it: what a launched process calls.

    :returns: ``model``, its folder; nothing where it can't be written.
    """
    spec = RunSpec.from_dict(spec_data)
    job_log.redirect(link.emit, first=True)
    return _export(Session(link, spec, math.inf), spec, checkpoint)


def _export(session: Session, spec: RunSpec, checkpoint: str) -> dict[str, Any]:
    """Export a model; training is done, whatever becomes of that."""
    from saturn_airflow.training.exports import export_model

    try:
        return {"model": str(export_model(checkpoint, spec.job, session.folder / MODEL))}
    except OSError as error:
        if disks.is_fault(error):
            raise disks.fault(session.folder, error) from error
        session.emit("warning", message=f"the model can't be exported ({error}); {checkpoint} holds it")
        return {}


def _checked(found: Any, technique: str) -> tuple[dict[str, Any], float]:
    """What ``search`` returned, if it is what it should be."""
    try:
        parameters, seconds = found
        # A number that is none would come out of an XCom as None.
        parameters = json_mapping(dict(parameters), "parameters")
        if not 0 < float(seconds) < math.inf:
            raise ValueError
    except (TypeError, ValueError):
        raise TypeError(
            f"technique {technique!r}: search returned {found!r:.100}; it must return the parameters (a "
            "mapping that fits in JSON, without infinity or NaN) and the seconds of a global batch (above 0)"
        ) from None
    return parameters, float(seconds)
