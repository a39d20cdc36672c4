"""What training found of strategies that the guard had let pass: later rounds plan without them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from saturn_airflow.deciding.next_round import SweepState
from saturn_airflow.model import guards
from saturn_airflow.model.estimates import Key
from saturn_airflow.model.jobs import Job
from saturn_airflow.model.problem import Option, PlannedJob, Problem
from saturn_airflow.profiling.fingerprints import fingerprint
from saturn_airflow.profiling.options import Estimates, refusal


def without_refused(state: SweepState) -> SweepState:
    """``state`` as it is to be planned from: what jobs were refused they may not use."""
    estimates = _with_refusals(state)
    jobs = tuple(_without(job, estimates, state.jobs) for job in state.problem.jobs)
    problem = dataclasses.replace(state.problem, jobs=jobs)
    before, now = _strategies(state.problem), _strategies(problem)
    plan = state.plan
    if plan is not None:  # it can't be carried on with what is refused
        kept = [a for a in plan.assignments if (a.job, a.technique, a.devices) not in before - now]
        plan = dataclasses.replace(plan, assignments=tuple(kept))
    return dataclasses.replace(state, estimates=estimates, problem=problem, plan=plan)


def _strategies(problem: Problem) -> set[tuple[str, str, int]]:
    return {(job.name, o.technique, o.devices) for job in problem.jobs for o in job.options}


def _with_refusals(state: SweepState) -> Estimates:
    """The estimates with the verdicts of refusals, which hold for all jobs of the same code."""
    found = dict(state.estimates)
    for name, of_job in state.progress.items():
        job, entry = state.jobs[name], state.before.get(name)
        if entry is None or entry.own_code not in ("", guards.own_code(job)):
            continue  # what was refused is other code than is here now
        for refused in of_job.refusals:
            verdict = {guards.mark(job, refused.version): guards.refused(refused.reason)}
            for key, e in found.items():
                if key[:3] == (fingerprint(job), refused.technique, refused.devices):
                    found[key] = dataclasses.replace(e, verdicts={**e.verdicts, **verdict})
    return found


def _without(planned: PlannedJob, estimates: Estimates, jobs: Mapping[str, Job]) -> PlannedJob:
    """``planned`` without what it is refused; where nothing would be left, it keeps what it had."""
    job = jobs[planned.name]

    def kinds(option: Option) -> dict[str, float]:
        keys = {
            kind: Key(fingerprint(job), option.technique, option.devices, kind) for kind in option.seconds
        }
        known = {kind: estimates.get(key) for kind, key in keys.items()}
        return {k: option.seconds[k] for k, e in known.items() if e is None or refusal(job, e) is None}

    options = [dataclasses.replace(option, seconds=kinds(option)) for option in planned.options]
    left = tuple(option for option in options if option.seconds)
    return dataclasses.replace(planned, options=left or planned.options)
