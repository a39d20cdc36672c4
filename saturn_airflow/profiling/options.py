"""From what is known of jobs to what a planner may choose from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from saturn_airflow.model import guards
from saturn_airflow.model.cluster import Cluster
from saturn_airflow.model.estimates import Estimate, Key
from saturn_airflow.model.jobs import Job
from saturn_airflow.model.problem import Option, PlannedJob, Problem
from saturn_airflow.profiling.fingerprints import fingerprint
from saturn_airflow.profiling.host_parts import NOTHING_SEEN, HostBytes, within_hosts

Estimates = Mapping[Key, Estimate]


def by_key(*estimates: Estimate) -> dict[Key, Estimate]:
    """Estimates by what they are of; of two of the same, the last."""
    return {estimate.key: estimate for estimate in estimates}


def options_of(
    job: Job, estimates: Estimates, cluster: Cluster, memory: HostBytes = NOTHING_SEEN
) -> tuple[Option, ...]:
    """What the planner may choose from for ``job``: strategies that work and fit on a node it may use.

    :param memory: bytes that jobs may have on nodes, as far as that was learned.
    """
    mark = fingerprint(job)
    batches = total_batches(job, estimates)
    if batches is None:
        return ()
    marks: dict[str, str] = {}
    seconds: dict[tuple[str, int], dict[str, float]] = {}
    setup: dict[tuple[str, int], float] = {}
    own = [
        e
        for e in estimates.values()
        if e.fingerprint == mark and e.works and (job.techniques is None or e.technique in job.techniques)
    ]
    # Where nothing else is left, it may suffice for what the data are today.
    may = [e for e in own if not refusal(job, e, marks)] or [e for e in own if ran_out(job, e)]
    for e in within_hosts(job, may, cluster, memory):
        seconds.setdefault((e.technique, e.devices), {})[e.kind] = e.seconds(batches)
        paid_again = e.launch_seconds + e.setup_seconds
        setup[e.technique, e.devices] = min(paid_again, setup.get((e.technique, e.devices), paid_again))
    options = tuple(
        Option(technique, devices, kinds, setup[technique, devices])
        for (technique, devices), kinds in seconds.items()
    )
    planned = PlannedJob(job.name, options, tuple(job.nodes) if job.nodes else None)
    return tuple(o for o in options if any(Problem.fits(planned, o, node) for node in cluster))


def refusal(job: Job, estimate: Estimate, marks: dict[str, str] | None = None) -> str | None:
    """Why ``job`` may not use a strategy that others with its fingerprint may; None where it may.

    :param marks: the job's marks by version of a technique, as far as they were asked for.
    """
    marks = {} if marks is None else marks
    if estimate.version not in marks:
        marks[estimate.version] = guards.mark(job, estimate.version)
    verdict = estimate.verdicts.get(marks[estimate.version])
    if guards.allows(job, estimate.technique, verdict):
        return None
    assert verdict is not None
    wanted = "" if verdict.startswith(guards.REFUSED) else ", and Job(exact=True) wants it exact"
    return verdict.removeprefix(f"{guards.REFUSED}: ") + wanted


def ran_out(job: Job, estimate: Estimate) -> bool:
    """Whether the memory ran out under a strategy as ``job`` was trained, in a sweep before this one."""
    # Of most none has, and a mark takes a digest of the job.
    if not any(verdict.startswith(guards.RAN_OUT) for verdict in estimate.verdicts.values()):
        return False
    return estimate.verdicts.get(guards.mark(job, estimate.version), "").startswith(guards.RAN_OUT)


def total_batches(job: Job, estimates: Estimates) -> int | None:
    """Global batches ``job`` trains for; None where its data has no length."""
    if job.hparams.batches is not None:
        return job.hparams.batches
    assert job.hparams.epochs is not None
    return job.hparams.epochs * batches_per_epoch(job, estimates) or None


def batches_per_epoch(job: Job, estimates: Estimates) -> int:
    """Global batches in one pass over the data of ``job``; 0 where that is not known."""
    mark = fingerprint(job)
    # A technique with a search of its own need not count; whoever did speaks for all.
    return max((e.batches_per_epoch for e in estimates.values() if e.fingerprint == mark), default=0)


def still_known(jobs: Sequence[Job], found: Sequence[Estimate]) -> list[Estimate]:
    """What earlier sweeps ``found``, without what lacks the length of the data: by now they may say it."""
    estimates = by_key(*found)
    endless = {fingerprint(job) for job in jobs if total_batches(job, estimates) is None}
    return [e for e in found if e.reason or e.fingerprint not in endless]
