"""What becomes of a sweep's tasks when their DAG run is ended or cleared.

Airflow skips those that never ran. To it a skipped task is as good as one that succeeded: once what was
running is cleared and ends well, the DAG run would be a success though nothing was reported. And where one
instance of a mapped task runs, it makes all of them ``failed``, those that had succeeded as well: jobs that
had finished would be cleared with the others, and trained once more. Where a job of a sweep that had
reported is cleared alone and fails, the DAG run would be a success, too.

Where a DAG run is cleared and its DAG has changed, Airflow removes instances of mapped tasks by how many
there were to be before, and never runs what it has removed: a trial or a job would be missing.
"""

from __future__ import annotations

import logging
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

from pluggy import HookimplMarker

if TYPE_CHECKING:
    from collections.abc import Iterable

hookimpl = HookimplMarker("airflow")
log = logging.getLogger(__name__)

#: What Airflow says of DAG runs that failed without anybody's doing: then it skipped no task.
_BY_ITSELF = ("task_failure", "all_tasks_deadlocked")
#: What it says of those that succeeded so: nobody has marked them.
_BY_LAST_TASKS = "success"
#: Tasks that were skipped before were not needed: by how much, Airflow needs some time to skip thousands.
_JUST_NOW = timedelta(seconds=30)
_REPORT = "saturn_airflow.operators.report_task"


@hookimpl
def on_dag_run_failed(dag_run: Any, msg: str) -> None:
    """Say of the tasks of a sweep, and of those behind it, what became of them.

    So *Clear* with *Only failed* clears all that had not ended, and nothing else, and without its report the
    DAG run fails. Airflow calls this in the scheduler and in the API server.
    """
    if msg in _BY_ITSELF:
        return
    own, behind = tasks_of_sweeps(dag_run.dag.task_dict.values())
    if not own:
        return
    from saturn_airflow.plugin import listener_internals as airflow

    airflow.keep_what_was(dag_run, own, behind, datetime.now(timezone.utc) - _JUST_NOW)


@hookimpl
def on_dag_run_success(dag_run: Any, msg: str) -> None:
    """Have a DAG run fail where a task of a sweep, that was cleared alone, has failed since the report.

    Airflow looks at the last tasks alone, and the report, which had succeeded, says nothing of that.
    """
    if msg != _BY_LAST_TASKS:
        return
    tasks = list(dag_run.dag.task_dict.values())
    groups = reports_of(tasks)
    reports = {
        report: [task.task_id for task in tasks if task.task_id.startswith(group)]
        for report, group in groups.items()
    }
    if not reports:
        return
    from saturn_airflow.plugin import listener_internals as airflow

    if failed := airflow.failed_since(dag_run, reports):
        log.warning(
            "%s of %s fails, since %s has failed after its sweep's report: clear it with Downstream once it "
            "is mended",
            dag_run.run_id,
            dag_run.dag_id,
            ", ".join(sorted(set(failed))),
        )
        airflow.fail(dag_run)


@hookimpl
def on_dag_run_running(dag_run: Any, msg: str) -> None:
    """Have the instances of a sweep's mapped tasks stay until it is known how many there are to be.

    Airflow calls this in the scheduler as a DAG run begins, or begins again, before it looks whether the DAG
    has changed. One that was cleared while it ran does not begin again; its own tasks notice what is missing
    (``operators/xcom_parts.py``).
    """
    tasks = dag_run.dag.task_dict
    own, _ = tasks_of_sweeps(tasks.values())
    mapped = {name: lists_of(tasks[name]) for name in own if getattr(tasks[name], "is_mapped", False)}
    if mapped:
        from saturn_airflow.plugin import listener_internals as airflow

        airflow.keep_instances(dag_run, mapped)


def lists_of(task: Any) -> list[str]:
    """The tasks whose lists a mapped task is mapped over."""
    return [upstream.task_id for upstream in task.iter_mapped_dependencies()]


def tasks_of_sweeps(tasks: Iterable[Any]) -> tuple[list[str], list[str]]:
    """Which tasks of a DAG are of a sweep, and which others come after one.

    :param tasks: the DAG's, as the scheduler has them.
    """
    by_name = {task.task_id: task for task in tasks}
    reports = reports_of(by_name.values())
    groups = tuple(reports.values())
    own = {name for name in by_name if groups and name.startswith(groups)}
    behind = {name for report in reports for name in by_name[report].get_flat_relative_ids(upstream=False)}
    return sorted(own), sorted(behind - own)


def reports_of(tasks: Iterable[Any]) -> dict[str, str]:
    """The reports of sweeps among a DAG's tasks, each with what the names of its sweep's tasks begin with."""
    found = [task.task_id for task in tasks if getattr(task, "_task_module", None) == _REPORT]
    return {name: f"{name.rpartition('.')[0]}." for name in found}
