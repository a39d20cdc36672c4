"""Sweeps that nobody reports, ended or deleted with their DAG run, or renamed: in MLflow they end, too."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from airflow.sdk import Context, DagRunState, TaskInstanceState

from saturn_airflow.model.folders import slug
from saturn_airflow.model.settings import SweepSettings
from saturn_airflow.model.status import Status
from saturn_airflow.operators.context import SweepContext, home, mlflow_uri, pull_from_trials

if TYPE_CHECKING:
    from saturn_airflow.tracking import JobRun

REASON = "its DAG run was ended or deleted before it could report"
_RENAMED = "its DAG has no sweep of this name any more, so that nobody reports it"
_ENDED = (DagRunState.SUCCESS, DagRunState.FAILED)
#: States of a report that nobody will read; None is one.
_NEVER_RAN = (
    None,
    TaskInstanceState.SKIPPED,
    TaskInstanceState.UPSTREAM_FAILED,
    TaskInstanceState.REMOVED,
)
#: How long a task that Airflow is about to kill waits for MLflow, in seconds; what is not sent is kept.
_PATIENCE = 1.0


def end_with_dag_run(
    context: Context, settings: SweepSettings, job_run: JobRun | None, log: Callable[..., object]
) -> None:
    """End the run of a sweep if its DAG run has ended without a report; a train task of it is being stopped.

    Where that task alone was marked, the sweep may have reported meanwhile, and that stands. Whoever is
    stopped has little time, and Airflow may know nothing of its DAG run any more. What fails here is done by
    the next sweep of the DAG.

    :param job_run: the run of the task's job, which knows the sweep's.
    """
    from saturn_airflow import tracking

    sweep = SweepContext.of(context, settings.group)
    try:
        ti: Any = context["ti"]
        if has_ended(ti, sweep.run_id) and not _has_reported(ti, settings.report_task):
            parent = job_run.description["parent"] if job_run else None
            parent = parent or pull_from_trials(context, settings.trials_task, "sweep")
            uri = mlflow_uri(settings.mlflow_conn_id)
            tracking.reopen_sweep(uri, parent, sweep.folder, _PATIENCE).close(Status.STOPPED, REASON)
    except Exception as error:  # of Airflow's API
        log("The sweep is not ended in MLflow yet: %s", error)


def end_earlier(
    context: Context, uri: str, experiment: str, tasks: Collection[str], log: Callable[..., object]
) -> None:
    """End in MLflow what this DAG left running there: sweeps of earlier runs that ended without a report, and
    those of this run that have been renamed since, which others then need not plan with either.

    :param experiment: in which it is looked for.
    :param tasks: the DAG's, by their ids.
    """
    from saturn_airflow import tracking
    from saturn_airflow.launch.ledger import Ledger

    ti: Any = context["ti"]
    try:
        for sweep in tracking.running_sweeps(uri, experiment, ti.dag_id):
            dag_id, run_id, group = sweep.name
            folder = home() / "sweeps" / slug(dag_id) / slug(run_id) / slug(group)
            is_here = run_id == ti.run_id
            # Where there is no folder, it may be the sweep of another deployment.
            if not folder.is_dir() or tracking.has_unsent(folder):
                continue
            if _has_sweep(tasks, group) if is_here else not has_ended(ti, run_id):
                continue
            key, why = "/".join(sweep.name), _RENAMED if is_here else REASON
            log("%s is ended in MLflow: %s", key, why)
            tracking.stop_sweep(uri, sweep.mlflow_run, why, folder)
            Ledger(home()).remove(key)
    except Exception as error:  # of MLflow, or of Airflow's API
        log("What was cancelled earlier is not ended in MLflow: %s", error)


def _has_sweep(tasks: Collection[str], group: str) -> bool:
    return any(task.startswith(f"{group}.") for task in tasks)


def has_ended(ti: Any, run_id: str) -> bool:
    """Whether a DAG run of this task's DAG has ended, or is not there any more."""
    if ti.get_dr_count(dag_id=ti.dag_id, run_ids=[run_id]) == 0:
        return True
    return bool(ti.get_dr_count(dag_id=ti.dag_id, run_ids=[run_id], states=[state.value for state in _ENDED]))


def _has_reported(ti: Any, report_task: str) -> bool:
    """Whether the report of this task's DAG run has begun, which ends the sweep in MLflow itself."""
    found = ti.get_task_states(dag_id=ti.dag_id, task_ids=[report_task], run_ids=[ti.run_id])
    return found.get(ti.run_id, {}).get(report_task) not in _NEVER_RAN
