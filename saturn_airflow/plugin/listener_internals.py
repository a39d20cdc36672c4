"""What the listener uses of Airflow that is no part of its public interface; a test names what has moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from airflow.models.taskinstance import TaskInstance
from airflow.models.taskmap import TaskMap
from airflow.models.xcom import XCOM_RETURN_KEY, XComModel
from airflow.utils.state import DagRunState, TaskInstanceState
from sqlalchemy import and_, func, select, update
from sqlalchemy.orm import Session, object_session


def keep_what_was(dag_run: Any, own: Sequence[str], behind: Sequence[str], since: datetime) -> None:
    """Give tasks of a DAG run that was ended of late the states that tell what became of them.

    What was skipped is ``upstream_failed``; and instances of a sweep's mapped tasks that have returned
    something succeeded, though Airflow makes them ``failed`` with those of the same task that ran. It becomes
    so with what else is done in the session that the DAG run was read in, which goes on if it fails.

    :param own: the tasks of sweeps.
    :param behind: those that come after them.
    :param since: what got its state before keeps it.
    """
    session = object_session(dag_run)
    if session is None:
        return
    session.flush()
    # Not the session's own: in the scheduler that may not be committed, not even a part of it.
    with session.connection().begin_nested():
        _keep(session, dag_run, own, behind, since)


def _keep(session: Session, dag_run: Any, own: Sequence[str], behind: Sequence[str], since: datetime) -> None:
    """:func:`keep_what_was` within a savepoint."""
    # Not end_date, which a task that was cleared has from its try before.
    ended = [
        TaskInstance.dag_id == dag_run.dag_id,
        TaskInstance.run_id == dag_run.run_id,
        TaskInstance.updated_at >= since,
    ]
    skipped = TaskInstance.task_id.in_([*own, *behind]), TaskInstance.state == TaskInstanceState.SKIPPED
    waited = update(TaskInstance).where(*ended, *skipped).values(state=TaskInstanceState.UPSTREAM_FAILED)
    session.execute(waited.execution_options(synchronize_session=False))

    failed = TaskInstance.task_id.in_(own), TaskInstance.state == TaskInstanceState.FAILED
    returned = and_(
        XComModel.dag_id == TaskInstance.dag_id,
        XComModel.run_id == TaskInstance.run_id,
        XComModel.task_id == TaskInstance.task_id,
        XComModel.map_index == TaskInstance.map_index,
        XComModel.key == XCOM_RETURN_KEY,
    )
    query = select(TaskInstance.id, XComModel.timestamp).join(XComModel, returned)
    found = session.execute(query.where(*ended, *failed, TaskInstance.map_index >= 0)).all()
    done = [{"id": row, "state": TaskInstanceState.SUCCESS} for row, at in found if _is_of_try(at, row)]
    if done:
        session.execute(update(TaskInstance), done)


def failed_since(dag_run: Any, reports: Mapping[str, Sequence[str]]) -> list[str]:
    """The tasks of sweeps that have failed after their sweep's report had succeeded.

    :param reports: the reports, each with the tasks of its sweep.
    """
    session = object_session(dag_run)
    if session is None:
        return []
    session.flush()
    of_run = TaskInstance.dag_id == dag_run.dag_id, TaskInstance.run_id == dag_run.run_id
    found: list[str] = []
    for report, tasks in reports.items():
        reported = select(TaskInstance.end_date).where(
            *of_run, TaskInstance.task_id == report, TaskInstance.state == TaskInstanceState.SUCCESS
        )
        failed = select(TaskInstance.task_id).where(
            *of_run,
            TaskInstance.task_id.in_(tasks),
            TaskInstance.state == TaskInstanceState.FAILED,
            TaskInstance.end_date > reported.scalar_subquery(),
        )
        found += session.scalars(failed.order_by(TaskInstance.task_id)).all()
    return found


def fail(dag_run: Any) -> None:
    """Have a DAG run that is about to be a success fail."""
    dag_run.set_state(DagRunState.FAILED)


def keep_instances(dag_run: Any, mapped: Mapping[str, Sequence[str]]) -> None:
    """Let the lists of cleared tasks be as long as instances are mapped over them, until they are made anew.

    Airflow knows how long a list was, not that its task is to run again. It removes instances beyond that
    length, and creates none in their places when the list has grown. Those beyond the new length it removes
    as soon as that is known.

    :param mapped: the mapped tasks of sweeps, each with the tasks whose lists it is mapped over.
    """
    session = object_session(dag_run)
    if session is None:
        return
    session.flush()
    with session.connection().begin_nested():
        of_run = TaskInstance.dag_id == dag_run.dag_id, TaskInstance.run_id == dag_run.run_id
        highest = select(TaskInstance.task_id, func.max(TaskInstance.map_index)).where(
            *of_run, TaskInstance.task_id.in_(mapped), TaskInstance.map_index >= 0
        )
        counts: dict[str, int] = {}
        for name, index in session.execute(highest.group_by(TaskInstance.task_id)):
            for upstream in mapped[name]:
                counts[upstream] = max(index + 1, counts.get(upstream, 0))
        cleared = select(TaskInstance.task_id).where(
            *of_run, TaskInstance.task_id.in_(counts), TaskInstance.state.is_(None)
        )
        for upstream in session.scalars(cleared).all():
            of_list = TaskMap.dag_id == dag_run.dag_id, TaskMap.run_id == dag_run.run_id
            longer = update(TaskMap).where(
                *of_list, TaskMap.task_id == upstream, TaskMap.length < counts[upstream]
            )
            again = update(TaskInstance).where(
                *of_run,
                TaskInstance.task_id.in_([name for name, lists in mapped.items() if upstream in lists]),
                TaskInstance.state == TaskInstanceState.REMOVED,
            )
            for changed in (longer.values(length=counts[upstream]), again.values(state=None)):
                session.execute(changed.execution_options(synchronize_session=False))


def _is_of_try(at: datetime, row: UUID) -> bool:
    """Whether what was returned at a moment is of an instance's present try.

    What was cleared keeps what it returned until its next try begins. It gets a new id as it is cleared, and
    ids tell when they were made (UUID version 7: milliseconds since 1970 in the first 48 bits).
    """
    return row.version == 7 and at.timestamp() * 1000 >= row.int >> 80
