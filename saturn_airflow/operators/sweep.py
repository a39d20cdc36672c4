"""SaturnSweepOperator: the shape of a sweep in the DAG."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from datetime import timedelta
from typing import Any, Literal
from urllib.parse import quote

from airflow.sdk import (
    DAG,
    Asset,
    BaseOperator,
    TaskGroup,
    TriggerRule,
    XComArg,
)

from saturn_airflow.model import metrics
from saturn_airflow.model.arguments import in_seconds, unknown
from saturn_airflow.model.cluster import Cluster
from saturn_airflow.model.deadlines import Deadline
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.jobs import Job
from saturn_airflow.model.references import Reference, to_reference
from saturn_airflow.model.rounds import Rounds
from saturn_airflow.model.selection import Rule, rule_of
from saturn_airflow.model.settings import (
    LEAVE_OUT,
    MAKESPAN,
    MLFLOW_CONNECTION,
    Objective,
    OnMissingNode,
    Profile,
    SweepSettings,
)
from saturn_airflow.model.stage_settings import Stages
from saturn_airflow.operators import checked_jobs
from saturn_airflow.operators.context import deployed_teams, use_techniques_folder
from saturn_airflow.operators.graph import (
    champion_scored,
    first,
    profile_waves,
    rounds_of,
    short,
    wait_in_pool,
)
from saturn_airflow.operators.inventory import deployed_cluster
from saturn_airflow.operators.report_task import ReportOperator
from saturn_airflow.operators.trials_task import TrialsOperator

#: Of an asset, in characters.
_LONGEST_URI = 1500


class SaturnSweepOperator(TaskGroup):
    """Train many jobs on a cluster, each under the strategy that is best for the sweep as a whole.

    A task group that is used like an operator: it takes part in ``>>``, and :attr:`output` is its result
    for the next task. Its tasks: ``trials`` lists what must be measured, ``profile`` measures it in waves
    (the first each job once, the others what a plan would use; waves that are not needed are skipped),
    ``plan`` chooses technique, devices, node and order for all jobs together, ``train`` trains them (one
    mapped task per job), ``report`` closes the sweep.

    :param task_id: its name in the DAG.
    :param jobs: the jobs; or the output of an upstream task that returns a list of ``Job.to_dict()``. Texts
        in a job's arguments may be templates, such as ``data_args={"day": "{{ ds }}"}``.
    :param cluster: the nodes to train on (default: those of the deployment, which ``[saturn] nodes`` lists or
        which announced themselves with ``saturn devices --announce``).
    :param techniques: names of the techniques to choose from (default: all in the library).
    :param profile: ``"auto"`` measures what earlier sweeps don't know already; ``"fresh"`` measures all anew;
        ``"never"`` plans with what is known, and leaves out jobs of which nothing is.
    :param planning_seconds: the time limit of planning, in seconds or as a ``timedelta``. The first plan ends
        before when it has taken as long as a better one could save.
    :param objective: what the plan minimises: ``"makespan"``, the time until all jobs are done;
        ``"mean-completion"``, the time until a job is done, on average; ``"device-time"``, the time that
        devices are held, with every job done by the ``deadline``.
    :param deadline: for ``objective="device-time"``: how long the sweep may take, as a ``timedelta``, or a
        time of day in the DAG's timezone, such as ``"06:00"``, the first after the sweep began. Where no
        plan can meet it, all is planned to end as early as possible, and the plan's log, its page and the
        report say so.
    :param confidence: the odds with which the deadline is to be kept, from 0.5 to 0.99: the plan is made so
        that it ends by then with this probability, as far as the errors of earlier estimates tell. Where they
        are too few to tell, and where no plan can, all is planned to end as early as possible. Without it the
        plan's expected end is by the deadline.
    :param on_missed_deadline: a function, or its ``"module:name"``, called as ``f(context, deadline)`` when a
        plan can't meet the deadline, as soon as the sweep is expected to miss it, and when it has;
        ``deadline`` has ``at`` (seconds since the epoch), ``planned`` (whether a plan could meet it), on the
        way ``expected`` (when all is done) and, at the end, ``late_seconds``.
    :param metric: what the best job is chosen by: ``"eval_loss"``, ``"epoch_loss"`` (the mean training loss
        over the last epoch), ``"loss"``, or a metric of the jobs' own, such as ``"accuracy"`` or, where it
        has several values, ``"scores/f1"``. Default: ``eval_loss`` where all jobs have it, else
        ``epoch_loss``.
    :param mode: whether the metric is better small (``"min"``) or large (``"max"``); must be said of jobs'
        own metrics, and is ``"min"`` for losses.
    :param register_as: the registered model in MLflow that the best job becomes a version of, with the alias
        ``champion`` (or that of ``"name@alias"``): only if no job failed beyond ``allowed_failures`` and it
        beats the present champion by the metric.
    :param checkpoint_every: the time between checkpoints, in seconds or as a ``timedelta``.
    :param keep_checkpoints: how many checkpoints of a job are kept.
    :param checkpoints_budget: how much disk the sweep's checkpoints may take, such as ``"200 GB"``. What
        is more goes, the oldest that others stand in for first; never the last of an unfinished job.
    :param retries: how often a job whose training failed is tried again; it goes on from the last
        checkpoint. What is not the job's fault, such as a restarted worker, does not count.
    :param job_timeout: how long a job may have devices, in all its tries together; waiting for them does not
        count. Then it writes a checkpoint and has failed. An ``execution_timeout`` in the DAG's
        ``default_args`` means the same for jobs.
    :param allowed_failures: how many jobs may fail before the sweep counts as failed. Its result is handed
        on either way; but after a failed sweep, Airflow runs only tasks whose trigger rule allows that.
    :param rounds: how often to plan at the most, each time from what really happened: a number, or a policy
        such as ``Rounds(most=4, every_minutes=30)``. With 1, the default, the first plan is all there is,
        unless a node is lost or drained.
    :param selection: drops jobs between rounds that are not worth training on: ``SuccessiveHalving(...)``,
        ``MedianStopping(...)``, or a function of your own; see ``saturn_airflow.model.selection``.
    :param asset: the asset whose event tells downstream DAGs of a successful sweep, with the best job in
        its ``extra`` (default: ``saturn://<dag_id>/<task_id>``, percent-encoded).
    :param experiment: the MLflow experiment (default: the DAG's id).
    :param mlflow_conn_id: the Airflow connection to MLflow. Where the default one does not exist,
        ``MLFLOW_TRACKING_URI`` counts, else a store in Saturn's home.
    :param on_missing_node: what happens when no worker listens for a node as the sweep begins:
        ``"leave_out"`` plans with the others, which the plan's page says; ``"fail"`` fails. Where none
        answers, the sweep fails.
    :param priority: where several sweeps want the same devices, those of a higher one go first. ``[saturn]
        priorities`` may say how high a team's may be.
    :param team: whose sweep it is. Where ``[saturn] shares`` gives teams shares of the devices, the sweeps of
        one that used more of late go later, among those of one priority.
    :param preempt: whether running jobs may be stopped at a checkpoint when sweeps before this one want their
        devices; they go on later from there, perhaps under another technique. Not with ``rounds``.
    :param profile_args: what else Airflow is told of the tasks that measure, such as ``{"pool": "gpus"}``,
        ``priority_weight`` or ``on_failure_callback``.
    :param plan_args: the same for those that decide: ``trials``, ``choose``, ``plan``.
    :param train_args: the same for those that train; their ``execution_timeout`` is a ``job_timeout``.
    :param report_args: the same for ``report``.
    :param group_arguments: what else a ``TaskGroup`` takes: ``tooltip``, ``doc_md``, ``default_args``...
    :raises InvalidSweepError: when something about the sweep can't be right.
    """

    def __init__(
        self,
        *,
        task_id: str,
        jobs: Sequence[Job] | XComArg,
        cluster: Cluster | None = None,
        techniques: Sequence[str] | None = None,
        profile: Profile = "auto",
        planning_seconds: float | timedelta = 10.0,
        objective: Objective = MAKESPAN,
        deadline: timedelta | str | None = None,
        confidence: float | None = None,
        on_missed_deadline: Reference | None = None,
        metric: str | None = None,
        mode: Literal["min", "max"] | None = None,
        register_as: str | None = None,
        checkpoint_every: float | timedelta = 60.0,
        keep_checkpoints: int = 2,
        checkpoints_budget: str | None = None,
        retries: int = 2,
        job_timeout: timedelta | None = None,
        allowed_failures: int = 0,
        rounds: int | Rounds = 1,
        selection: Rule | Reference | None = None,
        asset: Asset | None = None,
        experiment: str | None = None,
        mlflow_conn_id: str = MLFLOW_CONNECTION,
        on_missing_node: OnMissingNode = LEAVE_OUT,
        priority: float = 0.0,
        team: str = "",
        preempt: bool = False,
        profile_args: Mapping[str, Any] | None = None,
        plan_args: Mapping[str, Any] | None = None,
        train_args: Mapping[str, Any] | None = None,
        report_args: Mapping[str, Any] | None = None,
        **group_arguments: Any,
    ) -> None:
        given = dict(locals())  # the arguments: nothing else has a name yet
        what = f"sweep {task_id!r}"
        try:
            if isinstance(jobs, list | tuple):
                jobs = [Job.from_dict(job) if isinstance(job, Mapping) else job for job in jobs]
            settings = _settings_of({**given, "jobs": jobs})
            checked_jobs.check_in_file(jobs, settings)
            _check_comparison(metric, mode)
            _check_asset(asset)
            stages = Stages(profile_args or {}, plan_args or {}, train_args or {}, report_args or {})
            _check_argument_names(group_arguments)
        except InvalidSweepError as error:
            raise InvalidSweepError(f"{what}: {error}") from None
        super().__init__(group_id=task_id, **group_arguments)
        _check_dag(self.dag, what)
        _check_not_mapped(self, what)
        assert self.group_id is not None
        self.asset = asset or Asset(
            name=f"{self.dag.dag_id}.{self.group_id}", uri=_asset_uri(self.dag.dag_id, self.group_id)
        )
        self.report = self._tasks(jobs, replace(settings, group=self.group_id), stages)

    def _tasks(
        self, jobs: Sequence[Job] | XComArg, settings: SweepSettings, stages: Stages
    ) -> ReportOperator:
        """The tasks of the sweep; its last."""
        with self.dag, self:
            trials = TrialsOperator(
                task_id="trials",
                jobs=jobs if isinstance(jobs, XComArg) else [job.fields() for job in jobs],
                settings=settings,
                **first(stages.plan),
            )
            waves = profile_waves(settings, trials, stages)
            plans, train, watching = rounds_of(settings, waves, stages)
            planned, trained = ([task.task_id for task in tasks] for tasks in (plans, train))
            trials.plan_task = planned[0]
            scoring = champion_scored(settings, planned, train, stages)
            report = ReportOperator(
                task_id="report",
                settings=settings,
                plan_tasks=planned,
                train_tasks=trained,
                scoring_tasks=[task.task_id for task in scoring],
                outlets=[self.asset],
                **short(stages.report, TriggerRule.ALL_DONE),
            )
            [*plans, *train, *watching, *scoring] >> report
        wait_in_pool(self)
        return report

    @property
    def output(self) -> XComArg:
        """The sweep's result, for the next task: best job, all outcomes, which jobs failed."""
        return XComArg(self.report)


def _settings_of(given: Mapping[str, Any]) -> SweepSettings:
    """The settings among the arguments of the operator, each checked.

    :raises InvalidSweepError: for one that can't be meant.
    """
    cluster, deadline, selection = given["cluster"], given["deadline"], given["selection"]
    settings = {field.name: given[field.name] for field in fields(SweepSettings) if field.name != "group"}
    settings |= {
        "cluster": deployed_cluster(_bound_nodes(given["jobs"])) if cluster is None else cluster,
        "techniques": _checked_techniques(given["techniques"]),
        "planning_seconds": in_seconds(given["planning_seconds"]),
        "checkpoint_every": in_seconds(given["checkpoint_every"]),
        "deadline": None if deadline is None else Deadline.of(deadline),
        "on_missed_deadline": _checked_function("on_missed_deadline", given["on_missed_deadline"]),
        "register_as": _checked_model_name(given["register_as"]),
        "job_timeout": _checked_seconds("job_timeout", given["job_timeout"]),
        "rounds": Rounds.of(given["rounds"]),
        "selection": None if selection is None else rule_of(selection),
    }
    checked = SweepSettings(**settings)
    deployed_teams().check(checked.team, checked.priority)
    return checked


def _bound_nodes(jobs: object) -> set[str]:
    """The nodes that jobs known by now are bound to."""
    known = jobs if isinstance(jobs, list | tuple) else []
    return {node for job in known if isinstance(job, Job) for node in job.nodes or ()}


def _check_not_mapped(sweep: TaskGroup, what: str) -> None:
    if any(sweep.iter_mapped_task_groups()):
        raise InvalidSweepError(
            f"{what}: it is in a task group that is mapped, and Airflow maps no tasks within one. Put it "
            "outside, with the jobs of all that is mapped: jobs= takes the output of an upstream task"
        )


def _check_dag(dag: DAG, what: str) -> None:
    if dag.fail_fast:
        raise InvalidSweepError(
            f"{what}: its DAG has fail_fast=True, with which Airflow allows no task that runs after a failed "
            "one, and a sweep plans and reports after those; leave it out: a sweep with failed jobs fails "
            "anyway, unless allowed_failures says otherwise"
        )


def _checked_techniques(techniques: Sequence[str] | None) -> list[str] | None:
    from saturn_airflow import library

    use_techniques_folder()
    if techniques is None:
        return None
    if isinstance(techniques, str) or not techniques:
        raise InvalidSweepError(f"techniques is {techniques!r}; give a list of names, or leave it out")
    library.check_names(techniques, "techniques")
    return list(techniques)


def _checked_model_name(register_as: str | None) -> str | None:
    if register_as is not None:
        from saturn_airflow.tracking.models import parse_name

        parse_name(register_as)
    return register_as


def _checked_function(name: str, function: Reference | None) -> str | None:
    return None if function is None else to_reference(function, name, "shop.alerts:page_somebody")


def _checked_seconds(name: str, value: timedelta | None) -> float | None:
    if value is None:
        return None
    if not isinstance(value, timedelta) or value <= timedelta(0):
        raise InvalidSweepError(f"{name} is {value!r}; give a timedelta above 0, such as timedelta(hours=8)")
    return value.total_seconds()


def _check_comparison(metric: str | None, mode: metrics.Mode | None) -> None:
    metrics.check_mode(metric, mode, "metric")
    if mode == "max" and metric is None:
        raise InvalidSweepError(
            "mode is 'max', but of no metric: without one jobs are compared by their losses, and the "
            "worst would be the best; name it, such as metric='accuracy'"
        )


def _check_asset(asset: Asset | None) -> None:
    if asset is not None and not isinstance(asset, Asset):
        raise InvalidSweepError(f"asset is {asset!r:.60}; give an airflow.sdk.Asset")


def _asset_uri(dag_id: str, group_id: str) -> str:
    """A name of the sweep's asset that Airflow takes: of ASCII alone, and not too long."""
    uri = f"saturn://{quote(dag_id, safe='')}/{quote(group_id, safe='')}"
    if len(uri) <= _LONGEST_URI:
        return uri
    return f"saturn://{hashlib.sha256(uri.encode()).hexdigest()}"


def _check_argument_names(arguments: Mapping[str, object]) -> None:
    own = [name for name in inspect.signature(SaturnSweepOperator).parameters if name != "group_arguments"]
    for name in set(arguments) - set(inspect.signature(TaskGroup).parameters):
        if name in inspect.signature(BaseOperator).parameters:
            raise InvalidSweepError(
                f"{name!r} is for tasks: write train_args={{{name!r}: ...}}, or default_args for all tasks"
            )
        raise InvalidSweepError(unknown(name, own))
