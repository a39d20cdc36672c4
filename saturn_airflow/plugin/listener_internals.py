"""What the listener uses of Airflow that is no part of its public interface; a test names what has moved."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from airflow.models.taskinstance import TaskInstance
from airflow.utils.state import TaskInstanceState
from sqlalchemy import update
from sqlalchemy.orm import object_session


def say_upstream_failed(dag_run: Any, tasks: Sequence[str], since: datetime) -> None:
    """Give the tasks of a DAG run that were skipped of late the state ``upstream_failed``.

    It becomes so with what else is done in the session that the DAG run was read in.

    :param since: what was skipped before stays so.
    """
    session = object_session(dag_run)
    if session is None:
        return
    session.execute(
        update(TaskInstance)
        .where(
            TaskInstance.dag_id == dag_run.dag_id,
            TaskInstance.run_id == dag_run.run_id,
            TaskInstance.task_id.in_(tasks),
            TaskInstance.state == TaskInstanceState.SKIPPED,
            # Not end_date, which a task that was cleared has from its try before.
            TaskInstance.updated_at >= since,
        )
        .values(state=TaskInstanceState.UPSTREAM_FAILED)
        .execution_options(synchronize_session=False)
    )
