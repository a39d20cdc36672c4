"""What the report says of several rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from airflow.sdk import Context

from saturn_airflow.model.entries import PlanEntry
from saturn_airflow.model.estimates import Estimate
from saturn_airflow.model.jobs import Job
from saturn_airflow.model.outcomes import Outcome
from saturn_airflow.model.problem import Problem
from saturn_airflow.model.settings import SweepSettings
from saturn_airflow.model.status import GOES_ON, Status
from saturn_airflow.operators.context import SweepContext
from saturn_airflow.operators.plan_task import STATE_KEY
from saturn_airflow.operators.round_outcomes import last_outcomes
from saturn_airflow.profiling.options import by_key

#: Seconds to plan what the sweep would have been without selection.
_PLANNING_SECONDS = 2.0


def at_last(ti: Any, plans: Sequence[str], trained: Sequence[str]) -> tuple[list[Outcome], list[PlanEntry]]:
    """Each job's last outcome as the sweep's, and its last entry in a plan.

    :param plans: the plan tasks of all rounds, first to last.
    :param trained: their train tasks.
    """
    entered = [ti.xcom_pull(task_ids=task, key="return_value", map_indexes=-1) or [] for task in plans]
    found = [{entry.name: entry for entry in map(PlanEntry.from_dict, entries)} for entries in entered]
    last = {name: entry for entries in found for name, entry in entries.items()}
    outcomes = last_outcomes(ti, plans, trained)
    return [_of_sweep(outcome, found[0]) for outcome in outcomes.values()], list(last.values())


def of_rounds(
    context: Context, settings: SweepSettings, plans: Sequence[str], jobs: Sequence[Job]
) -> dict[str, Any]:
    """How many rounds were used, and with a selection what training every job to its end would take.

    :returns: ``rounds``, where there may be several, and ``without_selection_seconds``, planned with the
        speeds that were seen.
    """
    ti = context["ti"]
    used = [task for task in plans if ti.xcom_pull(task_ids=task, key="return_value", map_indexes=-1)]
    found: dict[str, Any] = {}
    if max(settings.rounds.most, len(used)) > 1:
        found["rounds"] = len(used)
    state = ti.xcom_pull(task_ids=plans[0], key=STATE_KEY, map_indexes=-1)
    if settings.selection is not None and state:
        from saturn_airflow import planning
        from saturn_airflow.deciding import next_round
        from saturn_airflow.launch import progress

        problem = Problem.from_dict(state["problem"])
        sweep = SweepContext.of(context, settings.group)
        by_name = {job.name: job for job in jobs}
        so_far = {job.name: progress.of(sweep.job_folder(job.name)) for job in problem.jobs}
        estimates = by_key(*map(Estimate.from_dict, state["estimates"]))
        whole = next_round.learned(problem, next_round.seen(so_far, estimates, by_name), by_name)
        found["without_selection_seconds"] = planning.solve(whole, time_limit=_PLANNING_SECONDS).makespan
    return found


def _of_sweep(outcome: Outcome, first: Mapping[str, PlanEntry]) -> Outcome:
    """A job's last outcome as the sweep's.

    :param first: the entries of the first plan; later plans have what was left of their jobs.
    """
    if outcome.status in GOES_ON:
        reason = "no later round went on with it; see the plan tasks' logs"
        outcome = replace(outcome, status=Status.LOST, reason=reason)
    if outcome.planned is not None and outcome.job in first:
        planned_seconds = first[outcome.job].planned_seconds
        outcome = replace(outcome, planned=replace(outcome.planned, planned_seconds=planned_seconds))
    return outcome
