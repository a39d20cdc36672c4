"""The planning task: from estimates to a plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from airflow.sdk import Context
from airflow.sdk.exceptions import AirflowFailException

from saturn_airflow.model import formats, guards
from saturn_airflow.model.cluster import Cluster, Node
from saturn_airflow.model.entries import PlanEntry, Strategy
from saturn_airflow.model.errors import InvalidSweepError, MissedDeadlineError
from saturn_airflow.model.estimates import Estimate, Key
from saturn_airflow.model.jobs import Job
from saturn_airflow.model.plan import Assignment, Plan
from saturn_airflow.model.problem import PlannedJob, Problem
from saturn_airflow.model.settings import MAKESPAN, SweepSettings
from saturn_airflow.model.sharing import least_seconds
from saturn_airflow.operators import missed_deadlines
from saturn_airflow.operators.context import (
    SweepContext,
    finite,
    mlflow_uri,
    pull_from_trials,
)
from saturn_airflow.operators.parts import ListingOperator
from saturn_airflow.operators.presence import LEFT_OUT_KEY, left_out_now, present, why_absent
from saturn_airflow.operators.wave_tasks import Learned, quick_solve
from saturn_airflow.plugin.links import MlflowRunLink, PlanLink
from saturn_airflow.profiling.fingerprints import fingerprint, speed_versions
from saturn_airflow.profiling.options import Estimates, by_key, options_of, refusal, total_batches

#: What is shown of an estimate beside a job's plan.
_SHOWN = (
    *("technique", "devices", "kind", "seconds_per_batch", "spread", "uncertainty", "setup_seconds"),
    *("peak_device_bytes", "source", "observed_at"),
)

Planned = TypeVar("Planned")


class PlanOperator(ListingOperator):
    """Solve the sweep's SPASE problem.

    Returns the jobs in the order of their start, each with its strategy, node and devices. Pushes ``plan``
    (the plan; beside it the makespan of current practice, and the deadline), ``unplanned`` (jobs no strategy
    can train, with the reason), ``choices`` (for each job the strategies it had, with their estimates, and
    why this one was chosen), ``profiling`` (what the trials took) and ``attempt`` (what the report knows this
    plan's outcomes by).
    """

    operator_extra_links = (MlflowRunLink(), PlanLink())

    def __init__(self, *, settings: SweepSettings, profile_tasks: list[str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.settings = settings
        #: What the pages are told besides the plan.
        self.also_told: dict[str, Any] = {"compared_by": {"metric": settings.metric, "mode": settings.better}}
        self.profile_tasks = profile_tasks
        self.mlflow_url: str | None = None
        #: What is planned, and what is known of it, once that was read.
        self.jobs: dict[str, Job] = {}
        self.estimates: Estimates = {}
        #: When all has to be done, in seconds since the epoch, and whether the plan is made to meet it.
        self.ends_by: float | None = None
        self.meets_deadline = True
        #: Nodes that take no part, with the reasons.
        self.left_out: dict[str, str] = {}

    def execute(self, context: Context) -> list[dict[str, Any]]:
        """Plan.

        :raises AirflowFailException: when there are no trials, or no job has a strategy that works.
        """
        from saturn_airflow import tracking
        from saturn_airflow.planning.presenting import baselines
        from saturn_airflow.profiling import waves

        ti = context["ti"]
        sweep = SweepContext.of(context, self.settings.group)
        began = time.time()
        cluster = self.nodes_now(context)
        refusals, parent = (
            pull_from_trials(context, self.settings.trials_task, key) for key in ("refusals", "sweep")
        )
        learned = Learned.of(context, self.settings, self.profile_tasks, cluster)
        knowledge, fresh = learned.knowledge, learned.fresh
        jobs = {job.name: job for job in knowledge.jobs}
        ti.xcom_push("profiling", profiling(learned, began))
        estimates = waves.estimates_for_plan(knowledge, quick_solve(self.settings.planning_seconds))

        planned, unplanned = to_plan(learned, estimates, refusals, self.settings.profile, self.left_out)
        ti.xcom_push("unplanned", unplanned)
        self.also_told |= {"jobs": len(jobs), "not_planned": len(unplanned)}
        for entry in unplanned:
            self.log.error("%s is left out: %s", entry["job"], entry["reason"])
        if not planned:
            reasons = "; ".join(f"{entry['job']}: {entry['reason']}" for entry in unplanned)
            raise AirflowFailException(f"no job can be planned. {reasons}")

        try:
            problem = Problem(sweep.key, cluster.nodes, tuple(planned))
        except InvalidSweepError as error:
            raise AirflowFailException(str(error)) from None
        self.jobs, self.estimates = jobs, estimates
        self.ends_by = self.moment_of_deadline(context)
        plan = self.solve(problem)
        if not self.meets_deadline:
            late = {"at": self.ends_by, "planned": False}
            missed_deadlines.tell(self.settings.on_missed_deadline, context, late)
        practice = baselines.current_practice(problem)
        ti.xcom_push("choices", choices(self.part_of(problem), plan, jobs, estimates, refusals))
        self.log.info("%s", summary(plan, practice))
        made = time.time()
        ti.xcom_push("plan", self.told(plan, cluster, practice))
        ti.xcom_push("attempt", made)

        uri = mlflow_uri(self.settings.mlflow_conn_id)
        run = tracking.reopen_sweep(uri, parent, sweep.folder)
        run.log_plan(plan, cluster)
        lasting = [estimate for estimate in fresh if not estimate.passing]
        names = {fingerprint(job): job.name for job in reversed(knowledge.jobs)}
        tracking.estimate_store.record(uri, lasting, sweep.folder, speed_versions(), jobs=names)
        self.mlflow_url = run.url
        found = entries(plan, jobs, estimates, cluster, made)
        alone = least_seconds(problem.jobs, problem.nodes)
        by_name = {job.name: job for job in problem.jobs}
        arrived = pull_from_trials(context, self.settings.trials_task, "started")
        found = [
            replace(
                entry,
                strategies=strategies(entry, by_name[entry.name], estimates),
                arrived=arrived,
                alone=alone,
                deadline=self.ends_by,
            )
            for entry in found
        ]
        return [entry.to_dict() for entry in self.handed_on(found)]

    def handed_on(self, found: list[PlanEntry]) -> list[PlanEntry]:
        """The plan's entries as its train tasks get them."""
        return found

    def nodes_now(self, context: Context) -> Cluster:
        """The nodes to plan with."""
        cluster = self.settings.cluster
        self.left_out = left_out_now(context, self.settings.trials_task, cluster)
        for name, why in self.left_out.items():
            self.log.warning("This plan is without %s: %s", name, why)
        return present(cluster, self.left_out)

    def solve(self, problem: Problem) -> Plan:
        """The plan."""
        from saturn_airflow import planning

        return self.in_time(
            lambda objective, deadline: planning.solve(
                problem, objective=objective, deadline=deadline, time_limit=self.settings.planning_seconds
            )
        )

    def part_of(self, problem: Problem) -> Problem:
        """What of ``problem`` the plan is for: all of it."""
        return problem

    def moment_of_deadline(self, context: Context) -> float | None:
        """When all has to be done, in seconds since the epoch."""
        if self.settings.deadline is None:
            return None
        began = pull_from_trials(context, self.settings.trials_task, "started")
        return self.settings.deadline.moment(began, context["dag"].timezone)

    def in_time(self, make: Callable[[str, float | None], Planned]) -> Planned:
        """What ``make`` makes of the sweep's objective and the seconds that are left until its deadline.

        Where the deadline can't be met, all is to end as early as possible.
        """
        if self.ends_by is None:
            return make(self.settings.objective, None)
        left = self.ends_by - time.time() - self.settings.planning_seconds
        try:
            if left <= 0:
                raise MissedDeadlineError(f"planning ends {-left:.0f} s after it")
            return make(self.settings.objective, left)
        except MissedDeadlineError as error:
            self.log.error("THE DEADLINE CAN'T BE MET: %s. All is planned to end as early as possible", error)
            self.meets_deadline = False
            return make(MAKESPAN, None)

    def told(self, plan: Plan, cluster: Cluster, practice: Plan) -> dict[str, Any]:
        """The plan as the page and the report read it."""
        found = {
            **formats.stamp("a plan"),
            **plan.to_dict(),
            **cluster.to_dict(),
            "current_practice": practice.makespan,
            LEFT_OUT_KEY: self.left_out,
            **self.also_told,
        }
        if self.ends_by is not None:
            found["deadline"] = {"at": self.ends_by, "planned": self.meets_deadline}
        return dict(finite(found))


def to_plan(
    learned: Learned,
    estimates: Estimates,
    refusals: Sequence[Mapping[str, Any]],
    profile: str,
    left_out: Mapping[str, str],
) -> tuple[list[PlannedJob], list[dict[str, str]]]:
    """The jobs to plan, and those that are left out, each with the reason."""
    planned, unplanned = [], []
    knowledge = learned.knowledge
    for job in knowledge.jobs:
        options = options_of(job, estimates, knowledge.cluster)
        if options and job.name not in learned.broken:
            planned.append(PlannedJob(job.name, options, knowledge.cluster.among(job.nodes)))
        else:
            found = list(knowledge.known.values())
            reason = learned.broken.get(job.name) or why_absent(job, left_out)
            reason = reason or why_nowhere(job, found, refusals, profile)
            unplanned.append({"job": job.name, "reason": reason})
    return planned, unplanned


def profiling(learned: Learned, until: float) -> dict[str, float]:
    """What the trials of this sweep took.

    :param until: when the last was done, in seconds since the epoch.
    """
    return {
        "trials": learned.trials,
        "known": sum(e.source == "history" for e in learned.knowledge.known.values()),
        "seconds": until - learned.attempt,
    }


def choices(
    problem: Problem,
    plan: Plan,
    jobs: Mapping[str, Job],
    estimates: Estimates,
    refusals: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """For each planned job what it could have run under, with what is known of that, and why it does not.

    :param problem: what the plan is for, with the seconds that it was made with.
    """
    from saturn_airflow.planning.presenting.explaining import explain

    kinds = {node.name: node.kind for node in problem.nodes}
    seconds = {(job.name, o.technique, o.devices): o.seconds for job in problem.jobs for o in job.options}
    found = {}
    for reason in explain(problem, plan).reasons:
        a = reason.assignment
        mark = fingerprint(jobs[a.job])
        chosen = Key(mark, a.technique, a.devices, kinds[a.node])
        makespans = {(other.technique, other.devices): other.makespan for other in reason.alternatives}
        options = [
            {
                **{name: getattr(e, name) for name in _SHOWN},
                "reason": e.reason or refusal(jobs[a.job], e),
                "verdict": _verdict(jobs[a.job], e),
                "seconds": seconds.get((a.job, e.technique, e.devices), {}).get(e.kind),
                "makespan": plan.makespan if key == chosen else makespans.get((e.technique, e.devices)),
                "chosen": key == chosen,
            }
            for key, e in sorted(estimates.items(), key=lambda item: item[0][1:])
            if key.fingerprint == mark
        ]
        refused = [dict(r) for r in refusals if r["fingerprint"] == mark]
        found[a.job] = {"why": reason.text, "options": options, "refused": refused}
    return dict(finite(found))


def _verdict(job: Job, estimate: Estimate) -> str:
    """How a strategy trains ``job`` next to one device, in words."""
    if estimate.technique in job.trust:
        return guards.in_words(guards.TRUSTED)
    return guards.in_words(estimate.verdicts.get(guards.mark(job, estimate.version)))


def why_nowhere(
    job: Job, found: Sequence[Estimate], refusals: Sequence[Mapping[str, Any]], profile: str = "auto"
) -> str:
    """Why no strategy trains ``job``, in the words of each technique."""
    mark = fingerprint(job)
    own = [estimate for estimate in found if estimate.fingerprint == mark]
    works = [e for e in own if e.reason is None and (job.techniques is None or e.technique in job.techniques)]
    refused = [(e.technique, e.devices, reason) for e in works if (reason := refusal(job, e))]
    works = [e for e in works if not refusal(job, e)]
    if works and total_batches(job, by_key(*own)) is None:
        return "its data has no length; say how long to train with hparams=HParams(batches=...)"
    tried = refused + [(e.technique, e.devices, e.reason) for e in own if e.reason]
    tried += [(r["technique"], r["devices"], r["reason"]) for r in refusals if r["fingerprint"] == mark]
    reasons = "; ".join(f"{technique} x {devices}: {reason}" for technique, devices, reason in tried)
    if works:
        reasons = "; ".join(
            filter(None, [reasons, "what works needs more devices than the job's nodes have"])
        )
    if profile == "never" and not own:
        return "nothing is known of how fast it trains, and profile='never' lets nothing be measured"
    return "no strategy can train it. " + (reasons or "None was measured; see the logs of the profile tasks")


def entries(
    plan: Plan, jobs: Mapping[str, Job], estimates: Estimates, cluster: Cluster, made: float
) -> list[PlanEntry]:
    """The plan's jobs in the order of their start, each with all that its train task needs.

    :param made: when the plan was made, in seconds since the epoch.
    """
    ordered = sorted(plan.assignments, key=lambda a: (a.start, a.job))
    result = []
    for position, a in enumerate(ordered):
        job = jobs[a.job]
        node: Node = cluster[a.node]
        estimate = estimates[Key(fingerprint(job), a.technique, a.devices, node.kind)]
        result.append(
            PlanEntry(
                job=job,
                technique=a.technique,
                devices=a.devices,
                node=a.node,
                device_ids=a.device_ids,
                start=a.start,
                end=a.end,
                kind=node.kind,
                parameters=dict(estimate.parameters),
                verdict=estimate.verdicts.get(guards.mark(job, estimate.version)),
                seconds_per_batch=estimate.seconds_per_batch,
                setup_seconds=estimate.setup_seconds,
                source=estimate.source,
                version=estimate.version,
                batches=total_batches(job, estimates),
                fingerprint=estimate.fingerprint,
                attempt=made,
                position=position,
                after=before(a, ordered[:position]),
            )
        )
    return result


def strategies(entry: PlanEntry, job: PlannedJob, estimates: Estimates) -> tuple[Strategy, ...]:
    """What the job of ``entry`` may run under on its node: the planned, and what is narrower or faster.

    :param job: its strategies with their seconds.
    """
    planned = entry.technique, entry.devices
    found = {(way.devices, way.option.technique): way.option for way in job.ways.get(entry.kind, ())}
    found |= {(o.devices, o.technique): o for o in job.options if (o.technique, o.devices) == planned}
    result = []
    for (devices, technique), option in sorted(found.items()):
        estimate = estimates[Key(entry.fingerprint, technique, devices, entry.kind)]
        result.append(
            Strategy(
                technique=technique,
                devices=devices,
                parameters=dict(estimate.parameters),
                verdict=estimate.verdicts.get(guards.mark(entry.job, estimate.version)),
                seconds=option.seconds[entry.kind],
                setup_seconds=option.setup,
            )
        )
    return tuple(result)


def before(assignment: Assignment, earlier: Sequence[Assignment]) -> tuple[str, ...]:
    """The jobs that have the devices of ``assignment`` just before it.

    :param earlier: the assignments before it, in the order of their start.
    """
    last = {(a.node, device): a.job for a in earlier for device in a.device_ids}
    found = (last.get((assignment.node, device)) for device in assignment.device_ids)
    return tuple(dict.fromkeys(job for job in found if job is not None))


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
