"""When a sweep's jobs are expected to run, what those that wait are waiting for, and who goes before them."""

from __future__ import annotations

from dataclasses import dataclass

from saturn_airflow.model.plan import Place
from saturn_airflow.model.sharing import SharedCluster, SharedJob, SharedSweep, SharingRules
from saturn_airflow.sharing.forecast import ExpectedRun, StandingPlan
from saturn_airflow.sharing.ranking import Rank, ranks


@dataclass(frozen=True)
class ExpectedHolder:
    """Who has devices that somebody waits for.

    :param device_ids: which.
    :param until: when it is expected to leave them, in seconds of the cluster's clock.
    :param gives_way: whether it may be stopped at a checkpoint.
    """

    sweep: str
    job: str
    device_ids: tuple[int, ...]
    until: float | None
    gives_way: bool


@dataclass(frozen=True)
class Outlook:
    """What is to be expected of a job.

    :param left: the share of its batches that is still to be trained.
    :param place: where it runs; None while it waits.
    :param expected: None where it fits on no node that is up.
    :param holders: of the devices that it waits for.
    """

    job: str
    left: float
    place: Place | None
    expected: ExpectedRun | None
    holders: tuple[ExpectedHolder, ...] = ()


def outlooks(cluster: SharedCluster, plan: StandingPlan, sweep: SharedSweep) -> list[Outlook]:
    """The outlook of each job of ``sweep`` that is not done: those that run, then by expected start."""
    found = []
    for job in sweep.jobs:
        expected = plan.jobs.get((sweep.name, job.name))
        holders: tuple[ExpectedHolder, ...] = ()
        if job.place is None and expected is not None:
            holders = _holders(cluster, plan, expected.place)
        found.append(Outlook(job.name, job.left, job.place, expected, holders))
    return sorted(found, key=_in_order)


def goes_before(cluster: SharedCluster, rules: SharingRules, sweep: SharedSweep) -> dict[str, str]:
    """The sweeps whose turn is before that of ``sweep``, in order, each with the reason."""
    found = ranks(cluster, rules)
    own = found[sweep.name]
    before = sorted((other for other in found.values() if other.key < own.key), key=lambda other: other.key)
    return {other.name: _why_before(other, own) for other in before}


def _in_order(one: Outlook) -> tuple[bool, float, str]:
    return one.place is None, float("inf") if one.expected is None else one.expected.start, one.job


def _holders(cluster: SharedCluster, plan: StandingPlan, place: Place) -> tuple[ExpectedHolder, ...]:
    """Who has devices of ``place`` now."""
    wanted = set(place.device_ids)
    found = []
    for sweep in cluster.sweeps:
        for job in sweep.jobs:
            common = _devices_on(job, place.node) & wanted
            if common:
                expected = plan.jobs.get((sweep.name, job.name))
                # Where it gives way, it has left these devices after the first of its stays.
                until = None if expected is None else expected.stays[0].end
                found.append(
                    ExpectedHolder(sweep.name, job.name, tuple(sorted(common)), until, sweep.preempt)
                )
    return tuple(found)


def _devices_on(job: SharedJob, node: str) -> set[int]:
    return set(job.place_ids) if job.place is not None and job.place.node == node else set()


def _why_before(first: Rank, second: Rank) -> str:
    """In words why ``first`` goes before ``second``."""
    if first.starving != second.starving:
        return "it has waited far out of proportion"
    if first.priority != second.priority:
        return f"its priority is {first.priority:g}, and {second.priority:g} here"
    if first.measured != second.measured:
        return "it is being measured, and trials go first"
    if first.pressing != second.pressing:
        return "its deadline presses"
    if first.overdue != second.overdue:
        return "it has waited out of proportion"
    if first.work != second.work and first.left < second.left:
        return f"it has less left to do ({_hours(first.left)}, and {_hours(second.left)} here)"
    if first.work != second.work:
        return "its team used less of its share of late"
    return "it came first"


def _hours(device_seconds: float) -> str:
    if device_seconds < 7200:
        return f"{device_seconds / 60:.1f} device-minutes"
    return f"{device_seconds / 3600:.1f} device-hours"
