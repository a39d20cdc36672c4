"""A plan's jobs, each with all that its train task must know."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from saturn_airflow.model import guards
from saturn_airflow.model.cluster import Cluster, Node
from saturn_airflow.model.entries import PlanEntry, Strategy
from saturn_airflow.model.estimates import Estimate, Key
from saturn_airflow.model.jobs import Job
from saturn_airflow.model.plan import Assignment, Plan
from saturn_airflow.model.problem import Option, PlannedJob
from saturn_airflow.model.sharing import seconds_to_leave
from saturn_airflow.profiling.fingerprints import fingerprint
from saturn_airflow.profiling.options import Estimates, batches_per_epoch, total_batches


def entries(
    plan: Plan, jobs: Mapping[str, Job], estimates: Estimates, cluster: Cluster, made: float
) -> list[PlanEntry]:
    """The plan's jobs in the order of their start, each with all that its train task needs.

    :param made: when the plan was made, in seconds since the epoch.
    """
    ordered = sorted(plan.assignments, key=lambda a: (a.start, a.job))
    result = []
    for position, a in enumerate(ordered):
        job = jobs[a.job]
        node: Node = cluster[a.node]
        estimate = estimates[Key(fingerprint(job), a.technique, a.devices, node.kind)]
        result.append(
            PlanEntry(
                job=job,
                technique=a.technique,
                devices=a.devices,
                node=a.node,
                device_ids=a.device_ids,
                start=a.start,
                end=a.end,
                kind=node.kind,
                parameters=dict(estimate.parameters),
                verdict=_verdict(job, estimate),
                own_code=guards.own_code(job),
                seconds_per_batch=estimate.seconds_per_batch,
                setup_seconds=estimate.setup_seconds,
                source=estimate.source,
                version=estimate.version,
                batches=total_batches(job, estimates),
                per_epoch=batches_per_epoch(job, estimates),
                fingerprint=estimate.fingerprint,
                attempt=made,
                position=position,
                after=before(a, ordered[:position]),
            )
        )
    return result


def with_strategies(entry: PlanEntry, job: PlannedJob, estimates: Estimates) -> PlanEntry:
    """``entry`` with what its job may run under on its node.

    That is, beside other sweeps, the planned strategy and what is narrower or faster; and in the place of the
    planned one all that its devices suffice for.

    :param job: its strategies with their seconds.
    """
    here = {(o.devices, o.technique): o for o in job.options if entry.kind in o.seconds}
    planned = entry.devices, entry.technique
    beside = {(way.devices, way.option.technique) for way in job.ways.get(entry.kind, ())} | {planned}
    instead = {key for key in here if key[0] <= entry.devices and key != planned}

    def strategies(keys: Iterable[tuple[int, str]]) -> tuple[Strategy, ...]:
        return tuple(_strategy(entry, here[key], estimates) for key in sorted(keys))

    return dataclasses.replace(entry, strategies=strategies(beside), instead=strategies(instead))


def _strategy(entry: PlanEntry, option: Option, estimates: Estimates) -> Strategy:
    estimate = estimates[Key(entry.fingerprint, option.technique, option.devices, entry.kind)]
    return Strategy(
        technique=option.technique,
        devices=option.devices,
        parameters=dict(estimate.parameters),
        verdict=_verdict(entry.job, estimate),
        seconds=option.seconds[entry.kind],
        setup_seconds=option.setup,
        leaves_in=_leaves_in(estimate),
        version=estimate.version,
        peak_device_bytes=estimate.peak_device_bytes,
    )


def with_work_elsewhere(found: Sequence[PlanEntry], left: Mapping[str, float]) -> list[PlanEntry]:
    """``found``, each with what the jobs on other nodes need.

    :param left: by job, the share of its batches that is still to be trained.
    """
    work: dict[str, float] = {}
    for entry in found:
        areas = [
            s.devices * (s.setup_seconds + left[entry.name] * (s.seconds - s.setup_seconds))
            for s in entry.strategies
        ]
        work[entry.node] = work.get(entry.node, 0.0) + min(areas)
    whole = sum(work.values())
    return [dataclasses.replace(entry, elsewhere=max(0.0, whole - work[entry.node])) for entry in found]


def _verdict(job: Job, estimate: Estimate) -> str | None:
    """What the guard said of it; None where that is not known, as of what ran out of memory."""
    verdict = estimate.verdicts.get(guards.mark(job, estimate.version))
    return None if verdict is None or verdict.startswith(guards.RAN_OUT) else verdict


def _leaves_in(estimate: Estimate) -> float | None:
    """Seconds that leaving the devices takes at the most; None where nothing is known.

    Taken from the end of a training, which writes a checkpoint, and more.
    """
    if not estimate.ending_seconds:
        return None
    return seconds_to_leave(estimate.ending_seconds, estimate.seconds_per_batch)


def before(assignment: Assignment, earlier: Sequence[Assignment]) -> tuple[str, ...]:
    """The jobs that have the devices of ``assignment`` just before it.

    :param earlier: the assignments before it, in the order of their start.
    """
    last = {(a.node, device): a.job for a in earlier for device in a.device_ids}
    found = (last.get((assignment.node, device)) for device in assignment.device_ids)
    return tuple(dict.fromkeys(job for job in found if job is not None))
