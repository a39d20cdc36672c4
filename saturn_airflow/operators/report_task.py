"""The last task of a sweep: what came of it."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator, Context
from airflow.sdk.exceptions import AirflowFailException

from saturn_airflow.model.entries import PlanEntry
from saturn_airflow.model.estimates import Estimate
from saturn_airflow.model.jobs import Job
from saturn_airflow.model.outcomes import Outcome
from saturn_airflow.model.plan import Plan
from saturn_airflow.model.settings import SweepSettings
from saturn_airflow.model.status import Status
from saturn_airflow.operators import (
    cancelled,
    deadline_watch,
    numbers_for_airflow,
    others,
    promises,
    wishes,
)
from saturn_airflow.operators.actual_speeds import actual_speeds, drifted
from saturn_airflow.operators.champion_task import scored
from saturn_airflow.operators.checkpoint_budgets import CheckpointBudgets
from saturn_airflow.operators.choosing import best_of, compared, not_registered, why_no_best, why_no_model
from saturn_airflow.operators.context import (
    SweepContext,
    finite,
    home,
    mlflow_uri,
    pull_from_trials,
)
from saturn_airflow.operators.leftovers import readable, send_unsent, stop_leftovers, with_last_checkpoints
from saturn_airflow.operators.lost_jobs import why_lost
from saturn_airflow.operators.pruning import prune
from saturn_airflow.operators.report_table import table, why_ended
from saturn_airflow.operators.round_report import at_last, of_rounds
from saturn_airflow.operators.shared_clock import ahead_of_plan
from saturn_airflow.plugin.links import MlflowRunLink
from saturn_airflow.profiling.fingerprints import fingerprint, speed_versions

if TYPE_CHECKING:
    from saturn_airflow.tracking import SweepRun

#: Clocks that differ by less than so many seconds tell the same time.
_SAME_TIME = 2.0
_AHEAD = (
    "The clock of %s is at least %.0f s ahead of this machine's: what is said below of the sweep's seconds, "
    "of its deadline and of what it promised is off by as much; set the clocks of all machines by NTP"
)


class ReportOperator(BaseOperator):
    """Close the sweep's run and hand its result to the next task; of each job its last outcome counts.

    The result is a mapping: ``best`` (job, metric, value, model_uri, run_id), ``jobs`` (one outcome per
    job), ``failed`` and ``pruned`` (names), ``planned_seconds``, ``actual_seconds``,
    ``gap``, ``utilisation``, ``device_hours``, ``deadline`` (where there was one: when, and
    whether it was met), ``promise`` (by when all was to be done with which odds, and whether it was
    ``kept``), ``champion`` (scored anew), ``registered`` (what came of ``register_as``, if it was
    given), ``mlflow_url`` and more; with several rounds ``rounds``, and with a selection
    ``without_selection_seconds``. It is pushed before the task fails for failed jobs.

    :param plan_tasks: of all rounds.
    """

    operator_extra_links = (MlflowRunLink(),)

    def __init__(
        self,
        *,
        settings: SweepSettings,
        plan_tasks: Sequence[str],
        train_tasks: Sequence[str],
        scoring_tasks: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.settings = settings
        self.plan_tasks = list(plan_tasks)
        self.train_tasks = list(train_tasks)
        self.scoring_tasks = list(scoring_tasks)
        self.mlflow_url: str | None = None
        self._readable: set[str] = set()

    def execute(self, context: Context) -> dict[str, Any]:
        """Report.

        :raises AirflowFailException: when more jobs failed than are allowed to.
        """
        sweep = SweepContext.of(context, self.settings.group)
        jobs = list(map(Job.from_dict, pull_from_trials(context, self.settings.trials_task, "jobs")))
        planned, unplanned, profiling = (
            context["ti"].xcom_pull(task_ids=self.plan_tasks[0], key=key, map_indexes=-1)
            for key in ("plan", "unplanned", "profiling")
        )
        outcomes, last_entries = at_last(context["ti"], self.plan_tasks, self.train_tasks)
        now = _now(sweep, last_entries)
        for node, seconds in ahead(outcomes, now).items():
            self.log.warning(_AHEAD, node, seconds)
        names = [job.name for job in jobs]
        if not planned:
            unplanned = of_no_plan(names, unplanned or [], self.plan_tasks[0])
        every = of_every_job(
            names, unplanned or [], outcomes, lambda lost: why_lost(context["ti"], self, lost)
        )
        plan = Plan.from_dict(planned) if planned else None
        made = context["ti"].xcom_pull(task_ids=self.plan_tasks[0], key="attempt", map_indexes=-1)
        result = summarize(every, plan, devices_of(planned) or self.settings.cluster.devices, made)
        self._readable = readable(sweep, names)
        stop_leftovers(sweep, [name for name in names if name in self._readable], self.log.info)
        others.forget(sweep)
        every = with_last_checkpoints(sweep, every, self._readable)
        result |= self._against_plan(context, planned, outcomes, made)
        started = pull_from_trials(context, self.settings.trials_task, "started")
        result |= stages(profiling, _now(sweep, last_entries) - started)
        errors = self._errors(context, sweep, planned, outcomes)
        speeds = actual_speeds(outcomes, last_entries)
        result["drifted"] = drifted(speeds, jobs)
        if len(self.plan_tasks) > 1:
            result |= of_rounds(context, self.settings, self.plan_tasks, jobs)
        every = self._tell_mlflow(context, sweep, jobs, every, speeds, errors, result)
        return self._end(context, sweep, every, result)

    def _against_plan(
        self, context: Context, planned: Mapping[str, Any] | None, outcomes: Sequence[Outcome], made: float
    ) -> dict[str, Any]:
        """What the plan was to win, and what became of its deadline, of which the author is told."""
        if not planned:
            return {}
        found: dict[str, Any] = {"current_practice_seconds": planned["current_practice"]}
        if promise := planned.get("promise"):
            found["promise"] = promises.became(promise, made, outcomes)
        if due := planned.get("deadline"):
            found["deadline"] = lateness(due, outcomes)
            if not found["deadline"]["met"]:
                deadline_watch.tell_author(self.settings.on_missed_deadline, context, found["deadline"])
        return found

    def _errors(
        self,
        context: Context,
        sweep: SweepContext,
        planned: Mapping[str, Any] | None,
        outcomes: Sequence[Outcome],
    ) -> dict[str, str]:
        """How far the first plan's estimates were off, as the tag by which later sweeps know."""
        from saturn_airflow.tracking import error_history

        first = context["ti"].xcom_pull(task_ids=self.plan_tasks[0], key="return_value", map_indexes=-1)
        entries = {entry.name: entry for entry in map(PlanEntry.from_dict, first or ())}
        if ahead(outcomes, _now(sweep, list(entries.values()))):
            return {}  # their gaps would be those of clocks
        fresh = bool(((planned or {}).get("promise") or {}).get("fresh", True))
        asked = promises.asked_in(outcomes, entries, (planned or {}).get("asks_in", 0.0))
        return error_history.tag(promises.errors_of(sweep.key, outcomes, entries), fresh, asked)

    def _too_many_failed(self, result: Mapping[str, Any]) -> bool:
        return len(result["failed"]) > self.settings.allowed_failures

    def _tell_mlflow(
        self,
        context: Context,
        sweep: SweepContext,
        jobs: Sequence[Job],
        outcomes: Sequence[Outcome],
        speeds: Sequence[Estimate],
        errors: Mapping[str, str],
        result: dict[str, Any],
    ) -> list[Outcome]:
        """Close the sweep's run with the best job, and register that; the outcomes with their models.

        :param result: gets what comes of it.
        :raises DiskError: when a full disk has no room for it; the last try goes on without.
        """
        from saturn_airflow import tracking

        settings = self.settings
        uri = mlflow_uri(settings.mlflow_conn_id)
        parent = pull_from_trials(context, settings.trials_task, "sweep")
        run = tracking.reopen_sweep(uri, parent, sweep.folder)
        for o in (o for o in outcomes if o.job in self._readable):
            tracking.end_left_open(o.job, sweep.job_folder(o.job), o.status, o.reason)
        tracking.send_outbox(uri, sweep.folder)
        every = with_runs(run, outcomes)
        result["jobs"] = [outcome.to_dict() for outcome in every]
        result["best"] = best_of(every, settings.metric, settings.better)
        if reason := why_no_best(every, settings.metric):
            self.log.warning("%s", reason)
        tracking.estimate_store.record(
            uri, speeds, sweep.folder, speed_versions(), jobs=job_names(jobs), source="trained"
        )
        against = scored(context, self.scoring_tasks)
        if against is not None and against["value"] is not None and result["best"]:
            result["champion"] = compared(against, result["best"], settings.better)
        run.tag(errors)
        run.log_report(result)
        too_many = self._too_many_failed(result)
        sent = run.close(Status.FAILED if too_many else Status.FINISHED)
        if context["ti"].try_number <= (context["ti"].max_tries or 0):
            run.check_kept()  # else the sweep would run for ever in MLflow
        if settings.register_as is not None and not too_many:
            result["registered"] = self.register(context, run, result["best"], every, against)
        self.mlflow_url = result["mlflow_url"] = run.url
        send_unsent(uri)
        if sent:
            cancelled.end_earlier(context, uri, parent["experiment"], self.dag.task_ids, self.log.info)
        return every

    def _end(
        self, context: Context, sweep: SweepContext, outcomes: Sequence[Outcome], result: dict[str, Any]
    ) -> dict[str, Any]:
        """Say what came of the sweep, and hand it on; files that have served their time are removed."""
        self.log.info("%s", table(result, outcomes))
        if "without_selection_seconds" in result:
            seconds = result["without_selection_seconds"]
            self.log.info("Without selection, training would take %.1f s", seconds)
        numbers_for_airflow.tell_of_sweep(result, {"dag_id": sweep.dag_id, "task_group": sweep.group_id})
        prune(sweep.folder, self.log.info)
        own = self.settings.checkpoints_budget
        CheckpointBudgets(sweep.folder, own, self.log.info, self.log.warning).keep(at_once=True)
        context["ti"].xcom_push("return_value", finite(result))
        if self._too_many_failed(result):
            reasons = "\n".join(f"  {o.job}: {why_ended(o)}" for o in outcomes if o.job in result["failed"])
            raise AirflowFailException(
                f"{len(result['failed'])} of {len(outcomes)} jobs failed "
                f"(allowed_failures={self.settings.allowed_failures}):\n{reasons}"
            )
        for asset in self.outlets:
            told = {key: result.get(key) for key in ("best", "failed", "registered")}
            context["outlet_events"][asset].extra = finite(told)
        return dict(finite(result))

    def register(
        self,
        context: Context,
        run: SweepRun,
        best: dict[str, Any] | None,
        outcomes: Sequence[Outcome],
        against: dict[str, Any] | None,
    ) -> dict[str, Any]:
        """Register the best model if there is one, it beats the champion, and this is no backfill."""
        register_as = str(self.settings.register_as)
        if best is None:
            why = why_no_best(outcomes, self.settings.metric)
            return not_registered(register_as, why or "no job has finished")
        if why := why_no_model(best, outcomes):
            return not_registered(register_as, why)
        if not wishes.registers(context):
            why = f"a backfill registers nothing unless its conf says so: {wishes.REGISTER_EXAMPLE}"
            return not_registered(register_as, why)
        training = next(outcome.training for outcome in outcomes if outcome.job == best["job"]) or 1
        return run.register(register_as, best, self.settings.better, against, home() / "registry", training)


def devices_of(planned: Mapping[str, Any] | None) -> int:
    """How many devices a plan had."""
    return sum(node["devices"] for node in (planned or {}).get("nodes", ()))


def with_runs(run: SweepRun, outcomes: Sequence[Outcome]) -> list[Outcome]:
    """``outcomes``, with run and model where a job's train task had ended before MLflow had answered."""
    found = []
    for outcome in outcomes:
        if outcome.model and not outcome.run_id:
            run_id = run.run_of(outcome.job, outcome.training or 1)
            if run_id is not None:
                outcome = replace(outcome, run_id=run_id, model_uri=f"runs:/{run_id}/model")
        found.append(outcome)
    return found


def of_no_plan(
    names: Sequence[str], unplanned: Sequence[Mapping[str, Any]], plan_task: str
) -> list[Mapping[str, Any]]:
    """Why each job was not planned, where nothing was: as its plan's task said it, or that this failed.

    :param unplanned: what the task said of jobs before it ended.
    """
    said = {entry["job"]: entry for entry in unplanned}
    why = f"nothing was planned, since {plan_task} did not succeed; its log says why"
    return [said.get(name) or {"job": name, "reason": why} for name in names]


def of_every_job(
    names: Sequence[str],
    unplanned: Sequence[Mapping[str, Any]],
    outcomes: Sequence[Outcome],
    why: Callable[[Sequence[str]], Mapping[str, str]],
) -> list[Outcome]:
    """An outcome for each of the sweep's jobs, in order: of those not planned and of those lost, too.

    :param why: says why some are lost, by their names; asked once, and only where there are such.
    """
    by_job = {outcome.job: outcome for outcome in outcomes}
    for entry in unplanned:
        by_job[entry["job"]] = Outcome(job=entry["job"], status=Status.NOT_PLANNED, reason=entry["reason"])
    if lost := [name for name in names if name not in by_job]:
        reasons = why(lost)
        by_job |= {name: Outcome(job=name, status=Status.LOST, reason=reasons[name]) for name in lost}
    return [by_job[name] for name in names]


def summarize(
    outcomes: Sequence[Outcome], plan: Plan | None, devices: int, made: float | None
) -> dict[str, Any]:
    """The figures of a sweep: what was planned, and what happened.

    :param outcomes: of all its jobs.
    :param devices: how many the plan had.
    :param made: when that was, in seconds since the epoch; plans and what comes of them count from there.
    """
    held = [o.held for o in outcomes if o.held is not None]
    began = [h.started_at for h in held] + ([] if made is None else [made])
    makespan = max(h.ended_at for h in held) - min(began) if held else 0.0
    busy = sum(o.held.actual_seconds * o.planned.devices for o in outcomes if o.held and o.planned)
    failed = [o.job for o in outcomes if o.status not in (Status.FINISHED, Status.PRUNED)]
    return {
        "failed": failed,
        "pruned": [o.job for o in outcomes if o.status == Status.PRUNED],
        "missing": failed,  # what DAGs read that were written for 0.1
        "planned_seconds": plan.makespan if plan else None,
        "lower_bound": plan.lower_bound if plan else None,
        "gap": plan.gap if plan else None,
        "planning_seconds": plan.seconds if plan else None,
        "actual_seconds": makespan,
        "utilisation": busy / (makespan * devices) if makespan else 0.0,
        "device_hours": busy / 3600,
        **estimate_errors(outcomes),
    }


def _now(sweep: SweepContext, entries: Sequence[PlanEntry]) -> float:
    """Seconds since the epoch by the clock as it was when the plan was made, by which outcomes are told."""
    planned_ahead = entries[0].ahead if entries else None
    return time.time() - ahead_of_plan(sweep.folder, planned_ahead)


def ahead(outcomes: Sequence[Outcome], now: float) -> dict[str, float]:
    """By node, for how many seconds at least its clock is ahead: its jobs ended after ``now``."""
    ends = [(o.held.ended_at - now, o.planned.node) for o in outcomes if o.held and o.planned]
    return {node: late for late, node in sorted(ends) if late > _SAME_TIME}


def estimate_errors(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """How far the seconds of jobs that ran in one go were from the planned: median and 90th percentile."""
    errors = sorted(
        abs(o.held.actual_seconds / o.planned.planned_seconds - 1)
        for o in outcomes
        # That a job would end early no plan knew.
        if o.in_one_go and o.held and o.planned and not o.reason
    )
    if not errors:
        return {}
    return {
        "estimate_error_median": statistics.median(errors),
        "estimate_error_p90": errors[math.ceil(0.9 * len(errors)) - 1],
    }


def lateness(deadline: Mapping[str, Any], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What became of the deadline.

    :returns: ``at`` (seconds since the epoch), ``planned`` (whether a plan could meet it), ``met``, and
        ``late_seconds``, negative where there was time to spare.
    """
    late = max((o.held.ended_at for o in outcomes if o.held), default=deadline["at"]) - deadline["at"]
    return {**deadline, "met": late <= 0, "late_seconds": late}


def stages(profiling: Mapping[str, float] | None, seconds: float) -> dict[str, float]:
    """What measuring took of the sweep's ``seconds`` so far."""
    if profiling is None:
        return {"sweep_seconds": seconds}
    return {
        "sweep_seconds": seconds,
        "trials": profiling["trials"],
        "profile_seconds": profiling["seconds"],
        "profile_share": profiling["seconds"] / seconds,
    }


def job_names(jobs: Sequence[Job]) -> dict[str, str]:
    """A job's name by fingerprint: that of the first of those alike."""
    return {fingerprint(job): job.name for job in reversed(jobs)}
