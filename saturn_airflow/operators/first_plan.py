"""What the trials of a sweep give its first plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from saturn_airflow.deciding.choices import why_nowhere
from saturn_airflow.model.jobs import Job
from saturn_airflow.model.problem import Option, PlannedJob
from saturn_airflow.operators.presence import why_absent
from saturn_airflow.operators.wave_tasks import Learned
from saturn_airflow.profiling.fingerprints import fingerprint
from saturn_airflow.profiling.host_parts import beyond_part
from saturn_airflow.profiling.knowledge import Knowledge
from saturn_airflow.profiling.options import Estimates, options_of


def to_plan(
    learned: Learned,
    estimates: Estimates,
    refusals: Sequence[Mapping[str, Any]],
    profile: str,
    left_out: Mapping[str, str],
    warn: Callable[[str], object] = lambda line: None,
) -> tuple[list[PlannedJob], list[dict[str, str]]]:
    """The jobs to plan, and those that are left out.

    :param refusals: what techniques said why they can't train a job.
    :param profile: the sweep's ``profile``, for the reason.
    :param left_out: nodes that take no part, with the reasons.
    :param warn: told of jobs that may crowd the memory of their nodes.
    :returns: the jobs with their options; and for each job without, ``job`` (its name) and ``reason``.
    """
    planned, unplanned = [], []
    knowledge = learned.knowledge
    for job in knowledge.jobs:
        options = options_of(job, estimates, knowledge.cluster, knowledge.memory)
        if options and job.name not in learned.broken:
            planned.append(PlannedJob(job.name, options, knowledge.cluster.among(job.nodes)))
            if why := crowds(job, options, estimates, knowledge):
                warn(
                    f"{job.name} may be ended where others fill its node's memory. "
                    f"All its strategies take more than their devices' part: {why}"
                )
        else:
            found = list(knowledge.known.values())
            reason = learned.broken.get(job.name) or why_absent(job, left_out)
            reason = reason or why_nowhere(job, found, refusals, profile, knowledge.cluster, knowledge.memory)
            unplanned.append({"job": job.name, "reason": reason})
    return planned, unplanned


def crowds(job: Job, options: Sequence[Option], estimates: Estimates, knowledge: Knowledge) -> str | None:
    """How much more of a node's memory than its devices' part a job may take; None where it keeps to that."""
    mark, planned = fingerprint(job), {(o.technique, o.devices, kind) for o in options for kind in o.seconds}
    reasons = [
        f"{e.technique} x {e.devices}: {why}"
        for e in estimates.values()
        if e.fingerprint == mark
        and (e.technique, e.devices, e.kind) in planned
        and (why := beyond_part(job, e, knowledge.cluster, knowledge.memory))
    ]
    return "; ".join(reasons) or None


def profiling(learned: Learned, until: float) -> dict[str, float]:
    """What the trials of this sweep took.

    :param until: when the last was done, in seconds since the epoch.
    :returns: ``trials`` and ``known`` (estimates from earlier sweeps) are numbers of them, and ``seconds``.
    """
    return {
        "trials": learned.trials,
        "known": sum(e.source == "history" for e in learned.knowledge.known.values()),
        "seconds": until - learned.attempt,
    }
