"""What the DAG's file says by now of a job that was cleared alone; its plan holds what that said before."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from saturn_airflow.model.definition import Change, Definition
from saturn_airflow.model.jobs import Job

_OF_TEMPLATES = ("{{", "{%", "{#")
#: Settled when the sweep begins: which version an alias means.
_SETTLED = "init_from"


def edits(job: Job, task: Any) -> list[Change]:
    """What differs of a planned job and the one of its name that the DAG's file has now.

    Texts that are templates are left out, since they are rendered when the sweep begins, and so are jobs
    whose names are; jobs that an upstream task returned are not in the file.

    :param task: of the sweep; its DAG was read from the file.
    """
    trials = task.dag.get_task(task.settings.trials_task)
    listed = [] if trials.from_upstream else trials.jobs
    of_name = [data for data in listed if data["name"] == job.name]
    if not of_name:
        return []
    now = Definition.of(Job.from_dict(of_name[0])).fields
    planned = Definition.of(job).fields
    return Definition(_known(planned, now)).changes(Definition(_known(now, now)))


def _known(fields: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """``fields`` without those that a template or a settled version stands for in ``now``."""
    found = {}
    for key, value in fields.items():
        other = now.get(key)
        if key == _SETTLED:
            continue
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            found[key] = _known(value, other)
        elif not any(mark in json.dumps(other) for mark in _OF_TEMPLATES):
            found[key] = value
    return found
