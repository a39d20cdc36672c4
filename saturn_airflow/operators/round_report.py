"""The report of a sweep with rounds."""

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
from saturn_airflow.model.status import GOES_ON, Status
from saturn_airflow.operators.context import SweepContext
from saturn_airflow.operators.report_task import ReportOperator
from saturn_airflow.operators.round_outcomes import last_outcomes
from saturn_airflow.operators.round_plan import STATE_KEY, learned
from saturn_airflow.profiling.options import by_key

#: Seconds to plan what the sweep would have been without selection.
_PLANNING_SECONDS = 2.0


class RoundReportOperator(ReportOperator):
    """Close a sweep with rounds: each job's last outcome counts.

    The result has ``rounds`` too (how many were used), and with a selection ``without_selection_seconds``:
    what training every job to its end would take, planned with the speeds that were seen.

    :param plan_tasks: of all rounds.
    """

    def __init__(self, *, plan_tasks: list[str], **kwargs: Any) -> None:
        super().__init__(plan_task=plan_tasks[0], **kwargs)
        self.plan_tasks = plan_tasks

    def trained(
        self, context: Context, attempt: float, entries: list[PlanEntry]
    ) -> tuple[list[Outcome], list[PlanEntry]]:
        """Each job's last outcome, and the last entry of it in a plan."""
        ti = context["ti"]
        last_entry: dict[str, PlanEntry] = {}
        for task in self.plan_tasks:
            entered = ti.xcom_pull(task_ids=task, key="return_value", map_indexes=-1) or []
            last_entry.update({entry.name: entry for entry in map(PlanEntry.from_dict, entered)})
        first = {entry.name: entry for entry in entries}
        last = last_outcomes(ti, self.plan_tasks, self.train_tasks)
        return [_at_last(outcome, first) for outcome in last.values()], list(last_entry.values())

    def comparison(self, context: Context, jobs: Sequence[Job]) -> dict[str, Any]:
        """How many rounds there were, and what they would have taken without selection."""
        ti = context["ti"]
        used = [t for t in self.plan_tasks if ti.xcom_pull(task_ids=t, key="return_value", map_indexes=-1)]
        found: dict[str, Any] = {"rounds": len(used)}
        state = ti.xcom_pull(task_ids=self.plan_tasks[0], key=STATE_KEY, map_indexes=-1)
        if self.settings.selection is not None and state:
            from saturn_airflow import planning
            from saturn_airflow.launch import progress

            problem = Problem.from_dict(state["problem"])
            sweep = SweepContext.of(context, self.settings.group)
            by_name = {job.name: job for job in jobs}
            so_far = {job.name: progress.of(sweep.job_folder(job.name)) for job in problem.jobs}
            estimates = by_key(*map(Estimate.from_dict, state["estimates"]))
            whole = learned(problem, so_far, estimates, by_name)
            found["without_selection_seconds"] = planning.solve(whole, time_limit=_PLANNING_SECONDS).makespan
            self.log.info("Without selection, training would take %.1f s", found["without_selection_seconds"])
        return found


def _at_last(outcome: Outcome, first: Mapping[str, PlanEntry]) -> Outcome:
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
