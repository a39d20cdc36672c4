"""When each job of a shared cluster is expected to start and to end, if nothing arrives."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from saturn_airflow.model.plan import Place
from saturn_airflow.model.sharing import SharedCluster, SharingRules
from saturn_airflow.sharing.replay import Key, StayOnDevices, replay
from saturn_airflow.sharing.turns import Decision, decide


@dataclass(frozen=True)
class ExpectedRun:
    """What is expected of a job. Seconds of the cluster's clock.

    :param place: where it runs first from now on.
    :param start: when it is launched there; the moment of its launch, where it runs.
    :param end: when it is done, after all the stops that are foreseen.
    :param stays: the stays on devices that it has from now on, in order; the first begins now at the
        earliest.
    """

    place: Place
    start: float
    end: float
    stays: tuple[StayOnDevices, ...]


@dataclass(frozen=True)
class StandingPlan:
    """A plan for all sweeps together.

    :param decision: what is to be done now.
    :param jobs: by sweep and job; jobs that fit on no node that is up are absent.
    :param sweeps: by sweep, when its last job is done; absent where one of its jobs is.
    """

    decision: Decision
    jobs: Mapping[Key, ExpectedRun]
    sweeps: Mapping[str, float]


def plan_together(cluster: SharedCluster, rules: SharingRules) -> StandingPlan:
    """Plan all sweeps of ``cluster`` together: what to do now, and what is expected to come of it.

    The expectations come from running the same decisions forward, event by event, with the seconds that are
    expected, so they foresee stops and changes of width that will pay when somebody is done.
    """
    found = replay((), cluster.nodes, rules, begin=cluster, learn=False)
    stays: dict[Key, list[StayOnDevices]] = {}
    for ran in found.ran:
        stays.setdefault((ran.sweep, ran.job), []).append(ran)
    left = {(sweep.name, job.name) for sweep in found.left.sweeps for job in sweep.jobs}
    # To the replay, what runs is launched now.
    since = {(s.name, j.name): j.since for s in cluster.sweeps for j in s.jobs if j.place is not None}
    jobs = {
        key: ExpectedRun(own[0].place, since.get(key, own[0].start), own[-1].end, tuple(own))
        for key, own in stays.items()
        if key not in left
    }
    asking = tuple(sweep for sweep in cluster.sweeps if sweep.has_asked(cluster.now))
    decision = decide(dataclasses.replace(cluster, sweeps=asking), rules)
    return StandingPlan(decision, jobs, dict(found.done))
