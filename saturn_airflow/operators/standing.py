"""Whether tasks downstream of one that runs stand: then it was cleared alone, and what it said holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from airflow.sdk import TaskInstanceState

#: States that, while a task runs, only tasks downstream of it have that were not cleared with it. One that
#: was cleared as it ran is `restarting`, and then `up_for_retry`.
_NOT_CLEARED = (
    TaskInstanceState.SUCCESS,
    TaskInstanceState.FAILED,
    TaskInstanceState.RUNNING,
    TaskInstanceState.QUEUED,
    TaskInstanceState.SCHEDULED,
)


def any_stands(ti: Any, tasks: Iterable[str]) -> bool:
    """Whether one of ``tasks``, which are downstream of that of ``ti``, was not cleared with it."""
    found = ti.get_task_states(dag_id=ti.dag_id, task_ids=sorted(set(tasks)), run_ids=[ti.run_id])
    return any(state in _NOT_CLEARED for state in found.get(ti.run_id, {}).values())
