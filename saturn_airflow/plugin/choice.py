"""Why one job runs as it does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from saturn_airflow.model import clear_secrets
from saturn_airflow.plugin.queries import PLAN, TRIALS, Record

#: Of an entry of a plan what is shown.
_SHOWN = ("round", "technique", "devices", "parameters", "moved_from", "attempt")


def job_choice(record: Record, group: str, job: str) -> dict[str, Any] | None:
    """The strategies that ``job`` had, round by round; None for an unknown job.

    :param record: read with ``DETAILS``.
    """
    jobs = [
        described
        for _, value in record.all_values(record.of(group, TRIALS), "jobs")
        for described in value
        if described["name"] == job
    ]
    if not jobs:
        return None
    return {
        "name": job,
        "description": clear_secrets.shown({key: value for key, value in jobs[-1].items() if key != "name"}),
        "rounds": sorted(_rounds(record, group, job), key=lambda entry: entry["attempt"]),
    }


def _rounds(record: Record, group: str, job: str) -> Iterator[dict[str, Any]]:
    """What each plan has for the job. ``choice`` is None where the alternatives were not recorded."""
    for task, entries in record.all_values(record.of(group, PLAN), "return_value"):
        choices = record.value(task.task_id, "choices")
        is_recorded = isinstance(choices, Mapping)
        for entry in entries:
            # A round may only conclude a job: one that it drops, or that ended before it.
            if entry["name"] == job and (not is_recorded or job in choices):
                choice = choices[job] if is_recorded else None
                yield {**{key: entry.get(key) for key in _SHOWN}, "choice": choice}
