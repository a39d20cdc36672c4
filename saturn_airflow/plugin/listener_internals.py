"""What the listener uses of Airflow that is no part of its public interface; a test names what has moved."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from airflow.models.taskinstance import TaskInstance
from airflow.models.xcom import XCOM_RETURN_KEY, XComModel
from airflow.utils.state import TaskInstanceState
from sqlalchemy import exists, update
from sqlalchemy.orm import object_session


def keep_what_was(dag_run: Any, tasks: Sequence[str], since: datetime) -> None:
    """Give tasks of a DAG run that was ended of late the states that tell what became of them.

    What was skipped is ``upstream_failed``; and instances of mapped tasks that have returned something
    succeeded, though Airflow makes them ``failed`` with those of the same task that ran. It becomes so with
    what else is done in the session that the DAG run was read in.

    :param since: what got its state before keeps it.
    """
    session = object_session(dag_run)
    if session is None:
        return
    has_returned = exists().where(
        XComModel.dag_id == TaskInstance.dag_id,
        XComModel.run_id == TaskInstance.run_id,
        XComModel.task_id == TaskInstance.task_id,
        XComModel.map_index == TaskInstance.map_index,
        XComModel.key == XCOM_RETURN_KEY,
    )
    ended = update(TaskInstance).where(
        TaskInstance.dag_id == dag_run.dag_id,
        TaskInstance.run_id == dag_run.run_id,
        TaskInstance.task_id.in_(tasks),
        # Not end_date, which a task that was cleared has from its try before.
        TaskInstance.updated_at >= since,
    )
    skipped = ended.where(TaskInstance.state == TaskInstanceState.SKIPPED)
    failed = ended.where(TaskInstance.state == TaskInstanceState.FAILED)
    done = failed.where(TaskInstance.map_index >= 0, has_returned)
    states = TaskInstanceState.UPSTREAM_FAILED, TaskInstanceState.SUCCESS
    for which, state in zip((skipped, done), states, strict=True):
        session.execute(which.values(state=state).execution_options(synchronize_session=False))
