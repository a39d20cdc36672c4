"""The plan of a sweep while others are active: around what they run, and by the rules that decide turns.

Planned alone it would run wide, on whatever node; but its jobs wait, and run as thriftily as those who wait
with them want it. So its nodes, strategies and times are those that are expected of it among all others. What
bounds them is the plan around the jobs of others that run: those keep their devices until they are done, or
may be told to leave.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from saturn_airflow.model.plan import Assignment, Place, Plan
from saturn_airflow.model.problem import Problem
from saturn_airflow.model.sharing import SharedCluster, SharedJob, SharedSweep, SharingRules
from saturn_airflow.planning.objectives import MEAN_COMPLETION
from saturn_airflow.planning.online.ends import PlanEnds
from saturn_airflow.planning.online.error_law import ErrorLaw
from saturn_airflow.sharing.drawn_futures import DRAWS, odds
from saturn_airflow.sharing.forecast import ExpectedRun, plan_together

#: With more jobs than this, fewer futures are drawn, so that planning does not wait: 90% is the 18th of 20.
_MANY_JOBS, _FEWER_DRAWS = 60, 19


def meets_others(problem: Problem, others: SharedCluster) -> bool:
    """Whether any job of ``others`` runs, or is to run, on the nodes of ``problem``."""
    names = {node.name for node in problem.nodes}
    known = [job for sweep in others.sweeps for job in sweep.jobs]
    places = {job.place.node for job in known if job.place is not None}
    waiting = [job.job.nodes for job in known if job.place is None]
    return bool(places & names) or any(nodes is None or names.intersection(nodes) for nodes in waiting)


def around(
    problem: Problem, others: SharedCluster, rules: SharingRules, own: Collection[Place] = ()
) -> Problem:
    """``problem`` with the moments at which the jobs of ``others`` that run leave its devices.

    Whole seconds, rounded down, so that its bounds hold. Who waits is not looked at: whatever their order, no
    plan begins before that.

    :param own: where jobs of the problem run. Those have their devices.
    """
    until = dict(others.busy)
    for sweep in others.sweeps:
        for job in sweep.jobs:
            if job.place is not None and job.place.node in others.kinds:
                end = _leaves_at(job, sweep, others, rules)
                until |= {(job.place.node, device): end for device in job.place.device_ids}
    for place in own:
        until |= dict.fromkeys(((place.node, device) for device in place.device_ids), 0.0)
    free = {}
    for node in problem.nodes:
        moments = [until.get((node.name, device), 0.0) - others.now for device in range(node.devices)]
        found = tuple(float(max(0, math.floor(at))) for at in moments)
        if any(found):
            free[node.name] = found
    return replace(problem, free=free)


def _leaves_at(job: SharedJob, sweep: SharedSweep, others: SharedCluster, rules: SharingRules) -> float:
    """The earliest moment at which ``job``, which runs, leaves its devices."""
    assert job.place is not None
    if job.leaving is not None:
        return job.leaving
    option = job.option
    net = option.seconds[others.kinds[job.place.node]] - option.setup
    end = others.now + job.setting_up + job.left * net
    if not sweep.preempt:
        return end
    # Who was stopped is not stopped again so soon, lest all its time go into checkpoints and starts.
    just = rules.was_just_stopped(job, others.now)
    told = max(others.now, (job.stopped or 0.0) + rules.quiet) if just else others.now
    return min(end, told + rules.seconds_to_leave(job))


def plan_among(
    problem: Problem, alone: Plan, sweep: SharedSweep, others: SharedCluster, rules: SharingRules
) -> Plan | None:
    """The plan of ``sweep`` for ``problem`` among ``others``; None where a job finds no place among them.

    :param alone: its plan around those of others that run: no plan ends before its bound.
    :param sweep: its facts; its jobs are those of the problem.
    :param others: the active sweeps, and their nodes; those that the problem has, too, are as it has them.
    :raises AssertionError: when what is expected never ends, which is a mistake of Saturn's.
    """
    own = tuple(node.name for node in problem.nodes)
    planned = {a.job: (a.node,) for a in alone.assignments}
    # Where some nodes are idle, or soon free, the exact plan's choice of nodes may be the better one.
    choices = ({job.name: job.nodes or own for job in problem.jobs}, planned)
    found = [
        expected_of(entered(problem, sweep, others, _bound(problem, of)), sweep, rules) for of in choices
    ]
    plans = [as_plan(alone, problem, each, others.now) for each in found if each]
    return min(plans, key=lambda plan: (plan.value or 0.0, plan.makespan), default=None)


def ends_among(
    jobs: Collection[SharedJob],
    problem: Problem,
    sweep: SharedSweep,
    others: SharedCluster,
    rules: SharingRules,
    law: ErrorLaw,
    seen: Collection[str] = (),
) -> PlanEnds:
    """When a plan among ``others`` may end; seconds from now.

    :param jobs: of ``sweep``, as the plan has them.
    :param law: of the errors of its estimates, and of those of others, too.
    :param seen: jobs that run and whose speed was seen there.
    :raises AssertionError: when what is expected never ends, which is a mistake of Saturn's.
    """
    cluster = entered(problem, sweep, others, jobs)
    draws = DRAWS if sum(len(each.jobs) for each in cluster.sweeps) <= _MANY_JOBS else _FEWER_DRAWS
    found = odds(cluster, rules, law, seen=[(sweep.name, job) for job in seen], draws=draws)
    ends = {job.name: found.jobs[sweep.name, job.name].since(others.now) for job in jobs}
    return PlanEnds(found.sweeps[sweep.name].since(others.now), ends)


def waiting_as_planned(problem: Problem, plan: Plan) -> tuple[SharedJob, ...]:
    """The jobs of ``problem`` as they wait under a plan that :func:`plan_among` made: bound to its nodes."""
    return _bound(problem, {a.job: (a.node,) for a in plan.assignments})


def _bound(problem: Problem, nodes_of: Mapping[str, tuple[str, ...]]) -> tuple[SharedJob, ...]:
    return tuple(SharedJob(replace(job, nodes=nodes_of[job.name])) for job in problem.jobs)


def entered(
    problem: Problem, sweep: SharedSweep, others: SharedCluster, jobs: Iterable[SharedJob]
) -> SharedCluster:
    """``others`` and ``sweep`` with these jobs; where one of them runs, nobody else does."""
    # What its jobs would win by changing later is not counted on: a plan has one strategy for each.
    own = replace(sweep, jobs=tuple(jobs), preempt=False)
    nodes = {node.name: node for node in (*others.nodes, *problem.nodes)}
    places = [job.place for job in own.jobs if job.place is not None]
    taken = {(place.node, device) for place in places for device in place.device_ids}
    busy = {device: until for device, until in others.busy.items() if device not in taken}
    beside = tuple(_without(one, taken) for one in others.sweeps)
    return replace(others, nodes=tuple(nodes.values()), sweeps=(*beside, own), busy=busy)


def _without(sweep: SharedSweep, taken: Collection[tuple[str, int]]) -> SharedSweep:
    """``sweep``, whose jobs on these devices must have left them."""
    return replace(
        sweep,
        jobs=tuple(
            replace(job, place=None, leaving=None, setting_up=0.0)
            if job.place is not None and any((job.place.node, d) in taken for d in job.place_ids)
            else job
            for job in sweep.jobs
        ),
    )


def expected_of(cluster: SharedCluster, sweep: SharedSweep, rules: SharingRules) -> dict[str, ExpectedRun]:
    """What to expect of each job of ``sweep``, one of ``cluster``; nothing where one finds no place."""
    expected = plan_together(cluster, rules).jobs
    own = next(one for one in cluster.sweeps if one.name == sweep.name)
    found = {job.name: expected.get((sweep.name, job.name)) for job in own.jobs}
    return {} if None in found.values() else {name: each for name, each in found.items() if each}


def as_plan(alone: Plan, problem: Problem, expected: Mapping[str, ExpectedRun], now: float) -> Plan:
    """What is expected, with the bounds of ``alone``."""
    assigned = _assignments(expected, now)
    end = max(a.end for a in assigned)
    found = replace(alone, makespan=end, lower_bound=min(alone.lower_bound, end), assignments=assigned)
    if alone.objective != MEAN_COMPLETION or alone.value_bound is None:
        return replace(found, value=None, value_bound=None)
    weights = {job.name: job.weight for job in problem.jobs}
    mean = sum(weights[a.job] * a.end for a in assigned) / (sum(weights.values()) or 1.0)
    return replace(found, value=mean, value_bound=min(alone.value_bound, mean))


def _assignments(expected: Mapping[str, ExpectedRun], now: float) -> tuple[Assignment, ...]:
    """Seconds of a plan begin now."""
    return tuple(
        Assignment(
            job,
            each.place.technique,
            each.place.devices,
            each.place.node,
            each.place.device_ids,
            max(0.0, each.start - now),
            each.end - now,
        )
        for job, each in expected.items()
    )
