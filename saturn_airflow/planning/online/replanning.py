"""Re-planning: carrying a plan on, and changing it only for the better."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from saturn_airflow.model.cluster import Node
from saturn_airflow.model.plan import Plan
from saturn_airflow.model.problem import Option, PlannedJob, Problem
from saturn_airflow.planning.instances.instance import Instance
from saturn_airflow.planning.instances.schedule import Placed, Schedule, times


def carry_on(instance: Instance, previous: Plan) -> Schedule:
    """The schedule of ``previous`` for the jobs of ``instance``: same strategies, nodes and order.

    Jobs that are gone are left out. Jobs that are new, or whose strategy or node is gone, follow where
    they end first.
    """
    problem = instance.problem
    jobs = {job.name: index for index, job in enumerate(problem.jobs)}
    nodes = {node.name: index for index, node in enumerate(problem.nodes)}
    schedule: Schedule = [[] for _ in problem.nodes]
    waiting = set(jobs.values())
    for a in sorted(previous.assignments, key=lambda a: (a.start, a.end)):
        job, node = jobs.get(a.job), nodes.get(a.node)
        if job is None or node is None:
            continue
        options = problem.jobs[job].options
        for index, mode in enumerate(instance.modes[job][instance.type_of[node]]):
            technique = options[mode.option].technique
            # Only Pareto strategies are modes: a job under another counts as one whose strategy is gone.
            same = technique == a.technique and mode.devices == a.devices
            if same and job in waiting:
                schedule[node].append(Placed(job, index))
                waiting.remove(job)
    for job in sorted(waiting):
        schedule = min(_with(instance, schedule, job), key=lambda found: found[0])[1]
    return schedule


def remaining(
    problem: Problem, progress: Mapping[str, float], running: Mapping[str, tuple[str, int]]
) -> Problem:
    """What is left to plan when some of ``problem`` has been trained: seconds, less what was trained of them.

    :param progress: the share of its batches that each job has trained; jobs at 1 are left out.
    :param running: technique and number of devices of the jobs that run now: under that strategy they
        need no setting up again, under any other they do.
    :raises InvalidSweepError: when nothing is left.
    """
    jobs = []
    for job in problem.jobs:
        left = 1 - min(1.0, max(0.0, progress.get(job.name, 0.0)))
        if left > 0:
            options = tuple(_left_of(job, option, left, running) for option in job.options)
            jobs.append(dataclasses.replace(job, options=options))
    return dataclasses.replace(problem, jobs=tuple(jobs))


def stranded(problem: Problem, nodes: Sequence[Node]) -> list[str]:
    """Jobs that fit on none of these nodes."""
    return [
        job.name
        for job in problem.jobs
        if not any(problem.fits(job, option, node) for option in job.options for node in nodes)
    ]


def on_nodes(problem: Problem, nodes: Sequence[Node]) -> Problem:
    """``problem`` on what is left of its nodes.

    :raises InvalidSweepError: naming a job that fits on none of them.
    """
    kinds = {node.kind for node in nodes}
    names = {node.name for node in nodes}
    jobs = []
    for job in problem.jobs:
        options = tuple(
            dataclasses.replace(o, seconds={k: s for k, s in o.seconds.items() if k in kinds})
            for o in job.options
        )
        jobs.append(
            dataclasses.replace(
                job,
                options=tuple(o for o in options if o.seconds),
                nodes=None if job.nodes is None else tuple(n for n in job.nodes if n in names),
            )
        )
    free = {name: moments for name, moments in problem.free.items() if name in names}
    return dataclasses.replace(problem, nodes=tuple(nodes), jobs=tuple(jobs), free=free)


def _left_of(job: PlannedJob, option: Option, left: float, running: Mapping[str, tuple[str, int]]) -> Option:
    # Only batches grow fewer: one that moves sets up anew.
    stays = running.get(job.name) == (option.technique, option.devices)
    setup = 0.0 if stays else option.setup
    seconds = {kind: setup + (whole - option.setup) * left for kind, whole in option.seconds.items()}
    return dataclasses.replace(option, seconds=seconds, setup=setup)


def _with(instance: Instance, schedule: Schedule, job: int) -> list[tuple[float, Schedule]]:
    """``schedule`` with ``job`` at the end of each node under each mode, and when it ends there."""
    found = []
    for node, row in enumerate(schedule):
        for index in range(len(instance.modes[job][instance.type_of[node]])):
            longer = [*row, Placed(job, index)]
            end = times(instance, node, longer)[-1].end
            found.append((end, [*schedule[:node], longer, *schedule[node + 1 :]]))
    return found
