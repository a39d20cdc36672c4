"""The last task of a sweep: what came of it."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator, Context
from airflow.sdk.exceptions import AirflowFailException

from saturn_airflow.model import guards
from saturn_airflow.model.estimates import Estimate
from saturn_airflow.model.jobs import Job
from saturn_airflow.model.metrics import value_of
from saturn_airflow.model.plan import Plan
from saturn_airflow.operators.context import (
    MLFLOW_CONNECTION,
    SweepContext,
    finite,
    mlflow_uri,
    pull_all,
    pull_from_trials,
)
from saturn_airflow.operators.leftovers import add_last_checkpoints, stop_leftovers
from saturn_airflow.operators.pruning import prune
from saturn_airflow.operators.train_task import OUTCOME_KEY
from saturn_airflow.plugin.links import MlflowRunLink
from saturn_airflow.profiling.fingerprints import fingerprint, speed_versions

if TYPE_CHECKING:
    from saturn_airflow.tracking import SweepRun

#: A speed that is further off than this share is measured again.
DRIFT = 0.15


class ReportOperator(BaseOperator):
    """Close the sweep's run and hand its result to the next task.

    The result is a mapping: ``best`` (job, metric, value, model_uri, run_id), ``jobs`` (one outcome per
    job), ``failed``, ``pruned`` and ``missing`` (names), ``planned_seconds``, ``actual_seconds``, ``gap``,
    ``utilisation``, ``gpu_hours`` (device-hours), ``deadline`` (where there was one: when, and whether it
    was met), ``registered`` (what came of ``register_as``), ``mlflow_url`` and more. It is pushed before the
    task fails for failed jobs.
    """

    operator_extra_links = (MlflowRunLink(),)

    def __init__(
        self,
        *,
        trials_task: str,
        plan_task: str,
        train_tasks: list[str],
        devices: int,
        metric: str | None,
        mode: str,
        allowed_failures: int,
        group: str,
        mlflow_conn_id: str = MLFLOW_CONNECTION,
        register_as: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.trials_task = trials_task
        self.plan_task = plan_task
        self.train_tasks = train_tasks
        self.devices = devices
        self.metric = metric
        self.mode = mode
        self.register_as = register_as
        self.allowed_failures = allowed_failures
        self.group = group
        self.mlflow_conn_id = mlflow_conn_id
        self.mlflow_url: str | None = None

    def execute(self, context: Context) -> dict[str, Any]:
        """Report.

        :raises AirflowFailException: when more jobs failed than are allowed to.
        """
        from saturn_airflow import tracking

        ti = context["ti"]
        sweep = SweepContext.of(context, self.group)
        job_dicts, parent = (pull_from_trials(context, self.trials_task, key) for key in ("jobs", "sweep"))
        jobs = [Job.from_dict(data) for data in job_dicts]
        planned, unplanned, attempt, profiling, entries = (
            ti.xcom_pull(task_ids=self.plan_task, key=key, map_indexes=-1)
            for key in ("plan", "unplanned", "attempt", "profiling", "return_value")
        )
        outcomes, entries = self.trained(context, attempt, entries or [])
        result = summarize(
            [job.name for job in jobs],
            Plan.from_dict(planned) if planned else None,
            unplanned or [],
            outcomes,
            devices_of(planned) or self.devices,
        )
        stop_leftovers(sweep, [job.name for job in jobs], self.log.info)
        add_last_checkpoints(sweep, result["jobs"])
        if planned:
            result["current_practice_seconds"] = planned["current_practice"]
            if due := planned.get("deadline"):
                result["deadline"] = lateness(due, outcomes)
        started = pull_from_trials(context, self.trials_task, "started")
        result |= stages(profiling, time.time() - started)
        speeds = actual_speeds(outcomes, entries)
        result["drifted"] = drifted(speeds, jobs)
        result |= self.comparison(context, jobs)

        uri = mlflow_uri(self.mlflow_conn_id)
        run = tracking.reopen_sweep(uri, parent, sweep.folder)
        tracking.send_outbox(uri, sweep.folder)
        add_runs(run, result["jobs"])
        result["best"] = best_of(result["jobs"], self.metric, self.mode)
        if reason := why_no_best(result["jobs"], self.metric):
            self.log.warning("%s", reason)
        names = job_names(jobs)
        tracking.estimate_store.update(uri, speeds, sweep.folder, speed_versions(), jobs=names)
        run.log_report(result)
        too_many = len(result["failed"]) > self.allowed_failures
        run.close("failed" if too_many else "finished")
        if self.register_as and result["best"] and not too_many:
            result["registered"] = run.register(self.register_as, result["best"], self.mode)
        self.mlflow_url = result["mlflow_url"] = run.url

        self.log.info("%s", table(result))
        prune(sweep.folder, self.log.info)
        ti.xcom_push("return_value", finite(result))
        if too_many:
            reasons = "\n".join(
                f"  {o['job']}: {o['reason']}" for o in result["jobs"] if o["job"] in result["failed"]
            )
            raise AirflowFailException(
                f"{len(result['failed'])} of {len(jobs)} jobs failed "
                f"(allowed_failures={self.allowed_failures}):\n{reasons}"
            )
        for asset in self.outlets:
            context["outlet_events"][asset].extra = {"best": result["best"], "failed": result["failed"]}
        return dict(finite(result))

    def trained(
        self, context: Context, attempt: float, entries: list[dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The outcome of each job, and the entry of the plan that it belongs to."""
        return pull_all(context, self.train_tasks, OUTCOME_KEY, attempt), entries

    def comparison(self, context: Context, jobs: Sequence[Job]) -> dict[str, Any]:
        """What else the result says; here nothing."""
        return {}


def devices_of(planned: Mapping[str, Any] | None) -> int:
    """How many devices a plan had."""
    return sum(node["devices"] for node in (planned or {}).get("nodes", ()))


def add_runs(run: SweepRun, outcomes: Sequence[dict[str, Any]]) -> None:
    """Add the run and the model of jobs whose train task ended before MLflow had answered."""
    for outcome in outcomes:
        if (
            outcome.get("model")
            and not outcome.get("run_id")
            and (run_id := run.run_of(outcome["job"], outcome.get("training", 1)))
        ):
            outcome |= {"run_id": run_id, "model_uri": f"runs:/{run_id}/model"}


def summarize(
    names: Sequence[str],
    plan: Plan | None,
    unplanned: Sequence[Mapping[str, Any]],
    outcomes: Sequence[Mapping[str, Any]],
    devices: int,
) -> dict[str, Any]:
    """Put together what was planned and what happened; every job of the sweep is in ``jobs``."""
    by_job = {outcome["job"]: dict(outcome) for outcome in outcomes}
    for entry in unplanned:
        by_job[entry["job"]] = {"job": entry["job"], "status": "not_planned", "reason": entry["reason"]}
    for name in names:
        by_job.setdefault(
            name, {"job": name, "status": "lost", "reason": "its train task left no outcome; see its log"}
        )
    trained = [o for o in by_job.values() if "started_at" in o]
    first = min((o["started_at"] for o in trained), default=0.0)
    last = max((o["ended_at"] for o in trained), default=0.0)
    makespan = last - first
    busy = sum(o["actual_seconds"] * o["devices"] for o in trained)
    failed = [name for name in names if by_job[name]["status"] not in ("finished", "pruned")]
    return {
        "jobs": [by_job[name] for name in names],
        "failed": failed,
        "pruned": [name for name in names if by_job[name]["status"] == "pruned"],
        "missing": failed,
        "planned_seconds": plan.makespan if plan else None,
        "lower_bound": plan.lower_bound if plan else None,
        "gap": plan.gap if plan else None,
        "planning_seconds": plan.seconds if plan else None,
        "actual_seconds": makespan,
        "utilisation": busy / (makespan * devices) if makespan else 0.0,
        "gpu_hours": busy / 3600,
        **estimate_errors(trained),
    }


def estimate_errors(outcomes: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """How far the seconds of jobs that ran in one go were from the planned: median and 90th percentile."""
    errors = sorted(abs(o["actual_seconds"] / o["planned_seconds"] - 1) for o in outcomes if _in_one_go(o))
    if not errors:
        return {}
    return {
        "estimate_error_median": statistics.median(errors),
        "estimate_error_p90": errors[math.ceil(0.9 * len(errors)) - 1],
    }


def lateness(deadline: Mapping[str, Any], outcomes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What became of the deadline.

    :returns: ``at`` (seconds since the epoch), ``planned`` (whether a plan could meet it), ``met``, and
        ``late_seconds``, negative where there was time to spare.
    """
    late = max((o["ended_at"] for o in outcomes if "ended_at" in o), default=deadline["at"]) - deadline["at"]
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


def actual_speeds(
    outcomes: Sequence[Mapping[str, Any]], entries: Sequence[Mapping[str, Any]] = ()
) -> list[Estimate]:
    """What the finished jobs' training says of their strategies, for later sweeps; one estimate for each.

    Where the speed is far from what ``entries`` of the plan say, the estimate is to be measured again.
    """
    planned = {entry["name"]: entry for entry in entries}
    alike: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for outcome in outcomes:
        if _in_one_go(outcome) and outcome["batches"]:
            same = (*(str(outcome[key]) for key in ("fingerprint", "technique", "devices", "kind")),)
            alike.setdefault((*same, json.dumps(outcome["parameters"], sort_keys=True)), []).append(outcome)
    return [_seen(group, planned) for group in alike.values()] + refused_at_last(outcomes, planned)


def refused_at_last(
    outcomes: Sequence[Mapping[str, Any]], planned: Mapping[str, Mapping[str, Any]]
) -> list[Estimate]:
    """The estimates that were planned with, for what the guard then refused: the next plan is to know."""
    return [
        Estimate(
            fingerprint=o["fingerprint"],
            technique=o["technique"],
            devices=o["devices"],
            kind=o["kind"],
            version=entry["version"],
            parameters=o["parameters"],
            setup_seconds=entry["setup_seconds"],
            seconds_per_batch=entry["seconds_per_batch"],
            verdicts={_mark(entry): guards.refused(o["reason"])},
        )
        for o in outcomes
        if o["status"] == "changes_result" and (entry := planned.get(o["job"]))
    ]


def _mark(entry: Mapping[str, Any]) -> str:
    return guards.mark(Job.from_dict(entry["job"]), entry["version"])


def _seen(outcomes: Sequence[Mapping[str, Any]], planned: Mapping[str, Mapping[str, Any]]) -> Estimate:
    """One estimate from jobs that trained alike."""
    first = outcomes[0]
    batches = sum(o["batches"] for o in outcomes)

    def mean(value: Callable[[Mapping[str, Any]], float]) -> float:
        return statistics.fmean(value(o) for o in outcomes)

    actual = sum(o["seconds_per_batch"] * o["batches"] for o in outcomes) / batches
    entry = planned.get(first["job"], {})
    stale = None
    if entry:
        expected = entry["seconds_per_batch"]
        offs = [o["seconds_per_batch"] / expected - 1 for o in outcomes]
        # Where one of those that trained alike agrees, the others had noise.
        if min(offs) > DRIFT or max(offs) < -DRIFT:
            off = actual / expected - 1
            stale = f"training took {actual:.4g} s per batch, {off:+.0%} against the estimate"
    return Estimate(
        fingerprint=first["fingerprint"],
        technique=first["technique"],
        devices=first["devices"],
        kind=first["kind"],
        version=entry.get("version", "1"),
        parameters=first["parameters"],
        launch_seconds=mean(lambda o: o["ready_seconds"]),
        setup_seconds=mean(lambda o: o["setup_seconds"]),
        seconds_per_batch=actual,
        evaluation_seconds=mean(lambda o: o.get("evaluation_seconds", 0.0)),
        ending_seconds=mean(_ending),
        spread=mean(lambda o: o["spread"]),
        batches=batches,
        batches_per_epoch=first["batches_per_epoch"],
        peak_device_bytes=max(o["peak_device_bytes"] for o in outcomes),
        peak_host_bytes=max(o["peak_host_bytes"] for o in outcomes),
        stale=stale,
        verdicts={
            _mark(planned[o["job"]]): o["verdict"]
            for o in outcomes
            if o.get("verdict", guards.TRUSTED) != guards.TRUSTED and o["job"] in planned
        },
    )


def _ending(outcome: Mapping[str, Any]) -> float:
    """Seconds that are neither launching nor batches nor evaluations: checkpoints, the export."""
    per_epoch = outcome["batches_per_epoch"]
    evaluations = math.ceil(outcome["batches"] / per_epoch) if per_epoch else 1
    told = outcome["ready_seconds"] + outcome["setup_seconds"]
    told += outcome["batches"] * outcome["seconds_per_batch"]
    told += evaluations * outcome.get("evaluation_seconds", 0.0)
    return float(max(0.0, outcome["actual_seconds"] - told))


def drifted(speeds: Sequence[Estimate], jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """Estimates that training did not bear out: they are measured again by the next sweep."""
    return [
        {
            "jobs": [job.name for job in jobs if fingerprint(job) == e.fingerprint],
            "technique": e.technique,
            "devices": e.devices,
            "kind": e.kind,
            "what": e.stale,
        }
        for e in speeds
        if e.stale
    ]


def job_names(jobs: Sequence[Job]) -> dict[str, str]:
    """A job's name by fingerprint: that of the first of those alike."""
    return {fingerprint(job): job.name for job in reversed(jobs)}


def _in_one_go(outcome: Mapping[str, Any]) -> bool:
    """Whether Saturn's own loop trained the job from start to end in one run."""
    return bool(outcome["status"] == "finished" and outcome.get("batches") == outcome.get("steps", -1))


def best_of(outcomes: Sequence[Mapping[str, Any]], metric: str | None, mode: str) -> dict[str, Any] | None:
    """The best of the trained jobs.

    Without a ``metric``, ``eval_loss`` counts where every trained job has it, else the mean loss over the
    last epoch.
    """
    finished = [o for o in outcomes if o["status"] == "finished"]
    if metric is None:
        metric = "eval_loss" if all(o.get("eval_loss") is not None for o in finished) else "epoch_loss"
    having = [(value, o) for o in finished if (value := value_of(o, metric)) is not None]
    if not having:
        return None
    value, best = (min if mode == "min" else max)(having, key=lambda pair: pair[0])
    return {
        "job": best["job"],
        "metric": metric,
        "value": value,
        "model_uri": best.get("model_uri"),
        "checkpoint": best.get("checkpoint"),
        "run_id": best.get("run_id"),
    }


def why_no_best(outcomes: Sequence[Mapping[str, Any]], metric: str | None) -> str | None:
    """Why none of the trained jobs is the best by ``metric``, if so: a mapping may lack it."""
    finished = [o for o in outcomes if o["status"] == "finished"]
    if metric is None or not finished or any(value_of(o, metric) is not None for o in finished):
        return None
    known = sorted(
        {name for o in finished for name in o.get("metrics") or {} if value_of(o, name) is not None}
    )
    return (
        f"no job has a number as its {metric!r}, so none is the best and none is registered; "
        f"of their own they have {', '.join(known) or 'no metrics'}"
    )


def table(result: Mapping[str, Any]) -> str:
    """The result as a table for the task's log."""
    width = max(len(o["job"]) for o in result["jobs"])
    metric = result["best"]["metric"] if result["best"] else "loss"
    wide = max(9, len(metric))
    lines = [f"{'job':{width}}  {'strategy':14} {'planned':>9} {'actual':>9} {metric:>{wide}}  status"]
    for o in result["jobs"]:
        strategy = f"{o['technique']} x {o['devices']}" if "technique" in o else "-"
        planned = f"{o['planned_seconds']:.1f} s" if "planned_seconds" in o else "-"
        actual = f"{o['actual_seconds']:.1f} s" if "actual_seconds" in o else "-"
        value = "-" if (found := value_of(o, metric)) is None else f"{found:.4f}"
        lines.append(
            f"{o['job']:{width}}  {strategy:14} {planned:>9} {actual:>9} {value:>{wide}}  {o['status']}"
        )
    if result.get("planned_seconds"):
        lines.append(
            f"makespan: planned {result['planned_seconds']:.1f} s (gap {100 * result['gap']:.1f}%), "
            f"actual {result['actual_seconds']:.1f} s, "
            f"devices busy {100 * result['utilisation']:.0f}% of it; "
            f"one after another on whole nodes: {result['current_practice_seconds']:.1f} s"
        )
    if due := result.get("deadline"):
        late = due["late_seconds"]
        lines.append(
            f"the deadline was met, with {-late:.0f} s to spare"
            if due["met"]
            else f"THE DEADLINE WAS MISSED by {late:.0f} s"
            + ("" if due["planned"] else ", as the plan had foreseen")
        )
    if "estimate_error_median" in result:
        lines.append(
            f"seconds per job were off by {100 * result['estimate_error_median']:.0f}% (median), "
            f"{100 * result['estimate_error_p90']:.0f}% (90th percentile)"
        )
    if "profile_seconds" in result:
        lines.append(
            f"{result['trials']} trials took {result['profile_seconds']:.0f} s, "
            f"{100 * result['profile_share']:.0f}% of the sweep's {result['sweep_seconds']:.0f} s"
        )
    for entry in result.get("drifted", ()):
        lines.append(
            f"{', '.join(entry['jobs'])} under {entry['technique']} x {entry['devices']}: {entry['what']}; "
            "the next sweep measures it again"
        )
    if best := result["best"]:
        lines.append(f"best: {best['job']} ({best['metric']} {best['value']:.4f}) {best['model_uri'] or ''}")
    if registered := result.get("registered"):
        version = registered["version"]
        what = f"version {version} @{registered['alias']}" if version else "nothing new"
        lines.append(f"registered as {registered['name']}: {what} ({registered['reason']})")
    for o in result["jobs"]:
        if o["status"] != "finished":
            lines.append(f"{o['job']} {o['status'].replace('_', ' ')}: {o['reason']}")
    return "\n".join(lines)
