"""What training found of strategies that the guard had let pass: later rounds plan without them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from saturn_airflow.deciding.next_round import SweepState
from saturn_airflow.model import guards
from saturn_airflow.model.estimates import Key
from saturn_airflow.model.jobs import Job
from saturn_airflow.model.problem import Option, PlannedJob, Problem
from saturn_airflow.model.refusals import RefusedStrategy
from saturn_airflow.model.status import Status
from saturn_airflow.profiling.fingerprints import fingerprint
from saturn_airflow.profiling.options import Estimates, refusal


def without_refused(state: SweepState) -> SweepState:
    """``state`` as it is to be planned from: what jobs were refused they may not use."""
    refusals = {name: _of_code_now(state, name) for name in state.progress}
    estimates = _with_verdicts(state, refusals)
    jobs = tuple(
        _without(job, estimates, state.jobs[job.name], refusals.get(job.name, ()))
        for job in state.problem.jobs
    )
    problem = dataclasses.replace(state.problem, jobs=jobs)
    plan, now = state.plan, _strategies(problem)
    if plan is not None:  # it can't be carried on with what is refused, now or since it was made
        kept = [a for a in plan.assignments if (a.job, a.technique, a.devices) in now]
        plan = dataclasses.replace(plan, assignments=tuple(kept))
    return dataclasses.replace(state, estimates=estimates, problem=problem, plan=plan)


def _strategies(problem: Problem) -> set[tuple[str, str, int]]:
    return {(job.name, o.technique, o.devices) for job in problem.jobs for o in job.options}


def _of_code_now(state: SweepState, name: str) -> tuple[RefusedStrategy, ...]:
    """What a job was refused; nothing where that is other code than is here now."""
    job, entry = state.jobs[name], state.before.get(name)
    is_same = entry is not None and entry.own_code in ("", guards.own_code(job))
    return state.progress[name].refusals if is_same else ()


def _with_verdicts(state: SweepState, refusals: Mapping[str, Sequence[RefusedStrategy]]) -> Estimates:
    """The estimates with the guard's refusals, which hold for all jobs of the same code."""
    found = dict(state.estimates)
    for name, of_job in refusals.items():
        job = state.jobs[name]
        for refused in of_job:
            if refused.status != Status.CHANGES_RESULT:
                continue
            verdict = {guards.mark(job, refused.version): guards.refused(refused.reason)}
            for key, e in found.items():
                if key[:3] == (fingerprint(job), refused.technique, refused.devices):
                    found[key] = dataclasses.replace(e, verdicts={**e.verdicts, **verdict})
    return found


def _without(
    planned: PlannedJob, estimates: Estimates, job: Job, refusals: Sequence[RefusedStrategy]
) -> PlannedJob:
    """``planned`` without what it is refused; where nothing would be left, it keeps what it had.

    :param refusals: its own; those that are not the guard's, such as of a job that wants to be exact, or
        whose memory ran out, say nothing of others.
    """
    own = {(refused.technique, refused.devices) for refused in refusals}

    def kinds(option: Option) -> dict[str, float]:
        keys = {
            kind: Key(fingerprint(job), option.technique, option.devices, kind) for kind in option.seconds
        }
        known = {kind: estimates.get(key) for kind, key in keys.items()}
        return {k: option.seconds[k] for k, e in known.items() if e is None or refusal(job, e) is None}

    may = [option for option in planned.options if (option.technique, option.devices) not in own]
    options = [dataclasses.replace(option, seconds=kinds(option)) for option in may]
    left = tuple(option for option in options if option.seconds)
    return dataclasses.replace(planned, options=left or planned.options)
