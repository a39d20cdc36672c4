"""What came of a training whose loop is the technique's own: by what it has told, and was asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from saturn_airflow.launch import past_runs
from saturn_airflow.launch.emitted import ReportedResult
from saturn_airflow.launch.event_file import Event
from saturn_airflow.launch.followed_run import all_of
from saturn_airflow.launch.run_spec import RunSpec
from saturn_airflow.model.errors import SaturnError
from saturn_airflow.model.status import Status


def result_of(result: Mapping[str, Any], reported: ReportedResult, spec: RunSpec) -> dict[str, Any]:
    """``result``, which the technique's process gave, with what was reported meanwhile.

    Saturn's loop says in ``result`` how many steps there are and whether the job has finished. A loop of the
    technique's own that was to train for ``spec.batch_count`` batches, and returned, has trained so many:
    whether the job has finished is a matter of how many it has in all. What it told in earlier runs counts,
    and in earlier turns of this one at its devices.
    """
    if spec.mode != "train":
        return dict(result)
    if "steps" in result:
        return {**reported.result(), **result}
    before = 0
    with contextlib.suppress(SaturnError, OSError):  # training is done, whatever can still be read
        before = past_runs.steps_by_itself(spec.folder, spec.technique)
        earlier = ReportedResult()
        for event in _told(spec):
            earlier.add(event)
        reported.go_on_from(earlier)
    found = {**reported.result(), **result}
    if spec.batch_count is None or found["status"] != Status.FINISHED:
        return found
    steps, total = max(found.get("steps", 0), before + spec.batch_count), spec.all_batches
    if total is not None and steps >= total:
        return found
    found.pop("model", None)  # of a job that is to go on
    return {**found, "status": Status.STOPPED, "steps": steps}


def _told(spec: RunSpec) -> Iterator[Event]:
    """What the runs of the job have told while they trained it under the technique of ``spec``."""
    for run in all_of(spec.folder):
        technique = run.spec.technique
        for event in run.so_far():
            if event["event"] == "leased":
                technique = event.get("technique", technique)
            elif technique == spec.technique:
                yield event
