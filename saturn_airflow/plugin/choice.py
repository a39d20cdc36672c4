"""Why one job runs as it does, and what came of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from saturn_airflow.plugin.reading import PLAN, TRAIN, TRIALS, Record

#: Of an entry of the plan, and of an outcome, what is worth showing.
_ENTRY = (
    "technique",
    "devices",
    "node",
    "device_ids",
    "parameters",
    "batches",
    "seconds_per_batch",
    "source",
)
_OUTCOME = (
    *("status", "reason", "technique", "devices", "planned_seconds", "actual_seconds", "seconds_per_batch"),
    *("steps", "loss", "epoch_loss", "eval_loss", "peak_device_bytes", "model_uri"),
)


def job_choice(record: Record, group: str, job: str) -> dict[str, Any] | None:
    """The strategies that ``job`` had, round by round, and what came of it; None for an unknown job.

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
        "description": {key: value for key, value in jobs[-1].items() if key != "name"},
        "rounds": sorted(_rounds(record, group, job), key=lambda entry: entry["attempt"]),
        "outcomes": [
            {key: outcome[key] for key in _OUTCOME if outcome.get(key) is not None}
            for _, outcome in record.all_values(record.of(group, TRAIN), "outcome")
            if outcome.get("job") == job
        ],
    }


def _rounds(record: Record, group: str, job: str) -> Iterator[dict[str, Any]]:
    """What each plan has for the job. ``choice`` is None where its alternatives were not recorded."""
    for task, entries in record.all_values(record.of(group, PLAN), "return_value"):
        choices = record.value(task.task_id, "choices")
        choice = choices.get(job) if isinstance(choices, Mapping) else None
        for entry in entries:
            if entry["name"] == job:
                yield {
                    **{key: entry.get(key) for key in _ENTRY},
                    "attempt": entry["attempt"],
                    "seconds": entry["end"] - entry["start"],
                    "choice": choice,
                }
