"""Baselines to compare plans with: common practice, list scheduling, the MILP of the paper."""

from __future__ import annotations

import dataclasses
import time

from saturn_airflow.model.plan import Assignment, Plan
from saturn_airflow.model.problem import PlannedJob, Problem
from saturn_airflow.planning.clock import Clock
from saturn_airflow.planning.heuristics.list_scheduling import first_come, list_schedule
from saturn_airflow.planning.instances.instance import Instance, group
from saturn_airflow.planning.instances.schedule import assignments, left_shift
from saturn_airflow.planning.lower_bounds.area import simple_bound


def current_practice(problem: Problem) -> Plan:
    """Each job on a whole node under its fastest strategy, one after another, on the first free node."""
    started = time.monotonic()
    instance = group(problem)
    free = [max(problem.free_of(node)) for node in problem.nodes]
    assigned = []
    for job, planned in enumerate(problem.jobs):
        ends = []
        for node, at in enumerate(free):
            if modes := instance.modes[job][instance.type_of[node]]:
                mode = min(modes, key=lambda mode: mode.seconds)
                ends.append((max(at, planned.release) + mode.seconds, node, mode))
        end, node, mode = min(ends)
        free[node] = end
        assigned.append(
            Assignment(
                planned.name,
                planned.options[mode.option].technique,
                mode.devices,
                problem.nodes[node].name,
                tuple(range(mode.devices)),
                end - mode.seconds,
                end,
            )
        )
    return _plan(instance, tuple(assigned), started)


def one_device(problem: Problem) -> Plan:
    """Each job on as few devices as it runs on (one, where it can), wherever it ends first."""
    started = time.monotonic()
    instance = group(problem)
    jobs = []
    for job in problem.jobs:
        fewest = _fewest(problem, job)
        jobs.append(dataclasses.replace(job, options=tuple(o for o in job.options if o.devices == fewest)))
    narrow = group(dataclasses.replace(problem, jobs=tuple(jobs)))
    return _plan(instance, assignments(narrow, first_come(narrow)), started)


def listed(problem: Problem) -> Plan:
    """List scheduling alone: what the planner starts from."""
    started = time.monotonic()
    instance = group(problem)
    schedule = list_schedule(instance, simple_bound(instance), Clock(60.0))
    return _plan(instance, assignments(instance, schedule), started)


def upstream(problem: Problem, time_limit: float) -> Plan | None:
    """The MILP of the Saturn paper, solved by HiGHS; None where it finds nothing in time."""
    from saturn_airflow.planning.presenting import paper_milp as paper

    started = time.monotonic()
    instance = group(problem)
    schedule = paper.schedule(instance, Clock(time_limit))
    if schedule is None:
        return None
    shifted = [left_shift(instance, node, row) for node, row in enumerate(schedule)]
    return _plan(instance, assignments(instance, shifted), started)


def _fewest(problem: Problem, job: PlannedJob) -> int:
    return min(o.devices for o in job.options for node in problem.nodes if problem.fits(job, o, node))


def _plan(instance: Instance, assigned: tuple[Assignment, ...], started: float) -> Plan:
    end = max(a.end for a in assigned)
    return Plan(
        instance.problem.name,
        "makespan",
        end,
        min(end, simple_bound(instance)),
        time.monotonic() - started,
        assigned,
    )
