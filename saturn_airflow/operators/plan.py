"""The planning task: from estimates to a plan."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from airflow.sdk import BaseOperator, Context
from airflow.sdk.exceptions import AirflowFailException

from saturn_airflow.cluster import Cluster, Node
from saturn_airflow.errors import InvalidSweepError
from saturn_airflow.estimates import Estimate
from saturn_airflow.jobs import Job
from saturn_airflow.operators.context import SweepContext, finite, mlflow_uri, pull_all, pull_from_trials
from saturn_airflow.operators.profile import ESTIMATE_KEY
from saturn_airflow.plan import Plan
from saturn_airflow.plugin.links import MlflowRunLink
from saturn_airflow.problem import Option, PlannedJob, Problem
from saturn_airflow.profiling.fingerprints import fingerprint, speed_versions

Estimates = Mapping[tuple[str, str, int, str], Estimate]


class PlanOperator(BaseOperator):
    """Solve the sweep's SPASE problem.

    Returns the jobs in the order of their start, each with its strategy, node and devices. Pushes ``plan``
    (the plan, with the makespan of current practice beside it), ``unplanned`` (jobs no strategy can train,
    with the reason) and ``attempt`` (what the report knows this plan's outcomes by).
    """

    operator_extra_links = (MlflowRunLink(),)

    def __init__(
        self,
        *,
        cluster: dict[str, Any],
        trials_task: str,
        profile_tasks: list[str],
        time_limit: float,
        group: str,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.cluster = cluster
        self.trials_task = trials_task
        self.profile_tasks = profile_tasks
        self.time_limit = time_limit
        self.group = group
        self.mlflow_url: str | None = None

    def execute(self, context: Context) -> list[dict[str, Any]]:
        """Plan.

        :raises AirflowFailException: when there are no trials, or no job has a strategy that works.
        """
        from saturn_airflow import planning, tracking
        from saturn_airflow.planning import baselines

        ti = context["ti"]
        sweep = SweepContext.of(context, self.group)
        cluster = Cluster.from_dict(self.cluster)
        job_dicts, refusals, known, parent, attempt = (
            pull_from_trials(context, self.trials_task, key)
            for key in ("jobs", "refusals", "known", "sweep", "attempt")
        )
        jobs = {data["name"]: Job.from_dict(data) for data in job_dicts}
        measured = pull_all(context, self.profile_tasks, ESTIMATE_KEY, attempt)
        broken = {name: entry["error"] for entry in measured if "error" in entry for name in entry["jobs"]}
        fresh = [Estimate.from_dict(entry["estimate"]) for entry in measured if "estimate" in entry]
        found = [*map(Estimate.from_dict, known), *fresh]
        estimates = {(e.fingerprint, e.technique, e.devices, e.kind): e for e in found}

        planned, unplanned = [], []
        for job in jobs.values():
            if options := options_of(job, estimates, cluster):
                planned.append(PlannedJob(job.name, options, tuple(job.nodes) if job.nodes else None))
            else:
                reason = broken.get(job.name) or why_nowhere(job, found, refusals)
                unplanned.append({"job": job.name, "reason": reason})
        ti.xcom_push("unplanned", unplanned)
        for entry in unplanned:
            self.log.error("%s is left out: %s", entry["job"], entry["reason"])
        if not planned:
            reasons = "; ".join(f"{entry['job']}: {entry['reason']}" for entry in unplanned)
            raise AirflowFailException(f"no job can be planned. {reasons}")

        try:
            problem = Problem(sweep.key, cluster.nodes, tuple(planned))
        except InvalidSweepError as error:
            raise AirflowFailException(str(error)) from None
        plan = planning.solve(problem, time_limit=self.time_limit)
        practice = baselines.current_practice(problem)
        self.log.info("%s", summary(plan, practice))
        made = time.time()
        ti.xcom_push("plan", finite({**plan.to_dict(), "current_practice": practice.makespan}))
        ti.xcom_push("attempt", made)

        uri = mlflow_uri()
        run = tracking.reopen_sweep(uri, parent, sweep.folder)
        run.log_plan(plan, cluster)
        lasting = [estimate for estimate in fresh if not estimate.passing]
        tracking.estimates.record(uri, lasting, sweep.folder, speed_versions())
        self.mlflow_url = run.url
        return entries(plan, jobs, estimates, cluster, made)


def options_of(job: Job, estimates: Estimates, cluster: Cluster) -> tuple[Option, ...]:
    """What the planner may choose from for ``job``: strategies that work and fit on a node it may use."""
    mark = fingerprint(job)
    batches = total_batches(job, estimates)
    if batches is None:
        return ()
    seconds: dict[tuple[str, int], dict[str, float]] = {}
    for (owner, technique, devices, kind), estimate in estimates.items():
        allowed = job.techniques is None or technique in job.techniques
        if owner == mark and estimate.reason is None and allowed:
            seconds.setdefault((technique, devices), {})[kind] = estimate.seconds(batches)
    options = tuple(Option(technique, devices, kinds) for (technique, devices), kinds in seconds.items())
    planned = PlannedJob(job.name, options, tuple(job.nodes) if job.nodes else None)
    return tuple(o for o in options if any(Problem.fits(planned, o, node) for node in cluster))


def total_batches(job: Job, estimates: Estimates) -> int | None:
    """Global batches ``job`` trains for; None where its data has no length."""
    if job.hparams.batches is not None:
        return job.hparams.batches
    assert job.hparams.epochs is not None
    mark = fingerprint(job)
    # A technique with a search of its own need not count; whoever did speaks for all.
    per_epoch = max((e.batches_per_epoch for e in estimates.values() if e.fingerprint == mark), default=0)
    return job.hparams.epochs * per_epoch or None


def why_nowhere(job: Job, found: Sequence[Estimate], refusals: Sequence[Mapping[str, Any]]) -> str:
    """Why no strategy trains ``job``, in the words of each technique."""
    mark = fingerprint(job)
    own = [estimate for estimate in found if estimate.fingerprint == mark]
    works = [e for e in own if e.reason is None and (job.techniques is None or e.technique in job.techniques)]
    if works and total_batches(job, {(mark, e.technique, e.devices, e.kind): e for e in own}) is None:
        return "its data has no length; say how long to train with hparams=HParams(batches=...)"
    tried = [(e.technique, e.devices, e.reason) for e in own if e.reason]
    tried += [(r["technique"], r["devices"], r["reason"]) for r in refusals if r["fingerprint"] == mark]
    reasons = "; ".join(f"{technique} x {devices}: {reason}" for technique, devices, reason in tried)
    if works:
        reasons = "; ".join(
            filter(None, [reasons, "what works needs more devices than the job's nodes have"])
        )
    return "no strategy can train it. " + (reasons or "None was measured; see the logs of the profile tasks")


def entries(
    plan: Plan, jobs: Mapping[str, Job], estimates: Estimates, cluster: Cluster, made: float
) -> list[dict[str, Any]]:
    """The plan's jobs in the order of their start, each with all that its train task needs."""
    ordered = sorted(plan.assignments, key=lambda a: (a.start, a.job))
    result = []
    for position, assignment in enumerate(ordered):
        job = jobs[assignment.job]
        node: Node = cluster[assignment.node]
        estimate = estimates[(fingerprint(job), assignment.technique, assignment.devices, node.kind)]
        result.append(
            {
                **assignment.to_dict(),
                "name": job.name,
                "kind": node.kind,
                "job": job.to_dict(),
                "parameters": dict(estimate.parameters),
                "seconds_per_batch": estimate.seconds_per_batch,
                "setup_seconds": estimate.setup_seconds,
                "batches": total_batches(job, estimates),
                "fingerprint": estimate.fingerprint,
                "attempt": made,
                "position": position,
            }
        )
    return result


def summary(plan: Plan, practice: Plan) -> str:
    """The plan in a few lines for the task's log."""
    lines = [
        f"Planned {len(plan.assignments)} jobs in {plan.seconds:.1f} s: makespan {plan.makespan:.1f} s, "
        f"proven lower bound {plan.lower_bound:.1f} s (gap {100 * plan.gap:.1f}%). "
        f"One after another on whole nodes they would take {practice.makespan:.1f} s."
    ]
    for a in sorted(plan.assignments, key=lambda a: (a.start, a.job)):
        devices = ",".join(str(i) for i in a.device_ids)
        lines.append(
            f"  {a.start:8.1f} - {a.end:8.1f} s  {a.job}  {a.technique} x {a.devices}  {a.node}[{devices}]"
        )
    return "\n".join(lines)
