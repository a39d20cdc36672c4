"""In which order sweeps have their turns.

Least remaining work first (device-seconds under the thriftiest strategies) is the order that makes the mean
of completion times small where work can be stopped (Schrage 1968 for one machine). Above it stand priorities,
then sweeps whose deadline would be missed otherwise, then those that wait out of proportion, so that nobody
starves: those whose stretch (Bender et al., 1998), the time from their arrival to their end over what they
take alone, becomes too large. Work counts for more where a team used more than its share of late. Trials are
over in no time: they go before all jobs of their priority, first come first served.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from saturn_airflow.model.cluster import Node
from saturn_airflow.model.problem import PlannedJob, Way
from saturn_airflow.model.sharing import SharedCluster, SharedJob, SharedSweep, SharingRules

#: A deadline is pressing when the time to it is less than this many times what the sweep needs at the least,
#: and the longest for which somebody would have devices who may begin before it and does not give way.
_PRESSING_FACTOR = 1.5
#: Seconds by which a moment is surely over.
_SOON = 1e-3
#: How many times the largest stretch a sweep may take until it goes before those of higher priority.
_STARVING_FACTOR = 1.2
#: The work of a team's sweeps counts as many times as the team used its share, to this power: teams whose
#: sweeps are alike have their shares; one whose are 16 times as small may have twice as much beside another.
_SHARE_EXPONENT = 4
#: What teams used counts against a prior: that each had its share of all devices for so many seconds.
_PRIOR_SECONDS = 3600.0


@dataclass(frozen=True)
class Rank:
    """A sweep's turn: the least goes first.

    :param starving: 0 where it has waited so far out of proportion that it goes before higher priorities.
    :param measured: 0 for trials, 1 for jobs.
    :param pressing: 0 where its deadline would be missed otherwise, a half where it is to be missed anyway.
    :param overdue: 0 where it is about to exceed the largest stretch.
    :param work: device-seconds that it still needs at the least, weighted by its team's use.
    :param changes: when it is overdue or starving, or its deadline presses, if it still waits then.
    :param left: the work as it is.
    """

    starving: float
    priority: float
    measured: float
    pressing: float
    overdue: float
    work: float
    arrived: float
    name: str
    changes: float = math.inf
    left: float = 0.0

    @property
    def may_not_wait(self) -> bool:
        """Whether devices are kept free for it, whoever has none before it."""
        return min(self.starving, self.overdue) == 0 or self.pressing < 1

    @cached_property
    def key(self) -> tuple[float, float, float, float, float, float, float, str]:
        """What is compared."""
        first = self.starving, -self.priority, self.measured, self.pressing, self.overdue
        return (*first, self.work, self.arrived, self.name)


def ways_on(job: PlannedJob, node: Node) -> tuple[Way, ...]:
    """The strategies under which ``job`` may run on ``node``, narrow and slow first."""
    if job.nodes is not None and node.name not in job.nodes:
        return ()
    ways = job.ways.get(node.kind, ())
    if not ways or ways[-1].devices <= node.devices:
        return ways
    return tuple(way for way in ways if way.devices <= node.devices)


class Needs(NamedTuple):
    """What a job still needs; 0 where no node is up for it.

    :param area: device-seconds, at the least.
    :param thrifty: seconds under the strategy of that.
    :param seconds: at the least.
    """

    area: float
    thrifty: float
    seconds: float


def needs_of(job: SharedJob, nodes: tuple[Node, ...]) -> Needs:
    """What ``job`` still needs on ``nodes``. Decisions ask it of all who wait, whom nothing changes."""
    if (found := job.needs.get(nodes)) is None:
        took = [
            (way.area(job.left), way.seconds(job.left)) for node in nodes for way in ways_on(job.job, node)
        ]
        area, thrifty = min(took, default=(0.0, 0.0))
        found = Needs(area, thrifty, min((seconds for _, seconds in took), default=0.0))
        job.needs[nodes] = found
    return found


def kinds_of(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """One node of each kind and size, where no job is bound to a node."""
    return tuple({(node.kind, node.devices): node for node in nodes}.values())


def ranks(cluster: SharedCluster, rules: SharingRules) -> dict[str, Rank]:
    """The turn of each sweep, by its name."""
    push, stays = pushes(cluster, rules), longest_stays(cluster, rules)
    return {sweep.name: _rank(cluster, sweep, rules, push, stays) for sweep in cluster.sweeps}


def _rank(
    cluster: SharedCluster,
    sweep: SharedSweep,
    rules: SharingRules,
    push: Mapping[str, float],
    stays: Mapping[str, float],
) -> Rank:
    """The turn of ``sweep``.

    :param push: what :func:`pushes` finds.
    :param stays: what :func:`longest_stays` finds.
    """
    tied = any(job.job.nodes is not None for job in sweep.jobs)
    nodes = cluster.nodes if tied else kinds_of(cluster.nodes)
    of_jobs = [needs_of(job, nodes) for job in sweep.jobs]
    work = sum(job.area for job in of_jobs)
    needs = max(max((job.seconds for job in of_jobs), default=0.0), work / max(1, cluster.devices))
    pressing, presses_at = _pressing(cluster, sweep, needs, stays)
    # If it had all devices from now on.
    stretch = (cluster.now - sweep.arrived + needs) / sweep.alone if sweep.alone > 0 else 0.0
    overdue = 0.0 if stretch > rules.largest_stretch else 1.0
    starving = 0.0 if stretch > _STARVING_FACTOR * rules.largest_stretch else 1.0
    left = work + sweep.elsewhere
    work = 0.0 if sweep.trials else left * push.get(sweep.team, 1.0)
    # Solved for the time at which the stretch above reaches the next of its two bounds.
    bound = (_STARVING_FACTOR if overdue == 0 else 1.0) * rules.largest_stretch * sweep.alone
    changes = math.inf if starving == 0 else sweep.arrived + bound - needs + _SOON
    changes = min(changes, presses_at)
    measured = 0.0 if sweep.trials else 1.0
    first = starving, sweep.priority, measured, pressing, overdue
    return Rank(*first, work, sweep.arrived, sweep.name, changes, left)


def _pressing(
    cluster: SharedCluster, sweep: SharedSweep, needs: float, stays: Mapping[str, float]
) -> tuple[float, float]:
    """How much the deadline of ``sweep`` presses, see :class:`Rank`; and when it begins to, if it does not.

    :param needs: seconds that the sweep needs at the least.
    """
    if sweep.deadline is None or sweep.deadline <= cluster.now:
        return 1.0, math.inf
    if sweep.deadline < cluster.now + needs:
        return 0.5, math.inf
    begins = sweep.deadline - _PRESSING_FACTOR * needs
    if begins > cluster.now:
        others = [other for other in cluster.sweeps if other is not sweep]
        behind = [other for other in others if other.priority <= sweep.priority]
        begins -= max((stays[other.name] for other in behind), default=0.0)
    return (0.0, math.inf) if begins <= cluster.now else (1.0, begins + _SOON)


def longest_stays(cluster: SharedCluster, rules: SharingRules) -> dict[str, float]:
    """By sweep, for how long a job of it that waits may have devices before it gives way, or ends.

    Nothing where no sweep has a deadline, which is what this is for.
    """
    if all(sweep.deadline is None for sweep in cluster.sweeps):
        return {}
    nodes = kinds_of(cluster.nodes)
    return {
        sweep.name: max(
            (_stay(cluster.now, nodes, sweep, job, rules) for job in sweep.jobs if job.place is None),
            default=0.0,
        )
        for sweep in cluster.sweeps
    }


def _stay(
    now: float, nodes: tuple[Node, ...], sweep: SharedSweep, job: SharedJob, rules: SharingRules
) -> float:
    ways = [way for node in nodes for way in job.job.ways.get(node.kind, ())[:1]]
    stay = max((way.seconds(job.left) for way in ways), default=0.0)
    if not sweep.preempt or rules.was_just_stopped(job, now):
        return stay
    # One that would be done soon is not stopped: it has to have several times what stopping costs to go.
    leaving = rules.seconds_to_leave(job)
    dear = rules.win * (leaving + max((way.setup for way in ways), default=0.0))
    return min(stay, dear + leaving)


def pushes(cluster: SharedCluster, rules: SharingRules) -> dict[str, float]:
    """By team, how many times its work counts: more for those that used more than their share of late.

    Nothing where no other team has an active sweep.

    Where little has been used yet, all are taken to have had their shares before.
    """
    total = sum(cluster.used.values())
    teams = {sweep.team for sweep in cluster.sweeps}
    if not rules.shares or not total or len(teams) < 2:
        return {}
    others = [team for team in sorted(teams | set(cluster.used)) if team not in rules.shares]
    rest = max(0.0, 1 - sum(rules.shares.values())) / max(1, len(others))
    before = cluster.devices * _PRIOR_SECONDS
    found = {}
    for team in teams:
        share = max(rules.shares.get(team, rest), 1e-3)
        of_all = (cluster.used.get(team, 0.0) + share * before) / (total + before)
        found[team] = max(of_all / share, 1.0) ** _SHARE_EXPONENT
    return found
