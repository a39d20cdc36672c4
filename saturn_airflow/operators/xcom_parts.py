"""Of the list that a task returns, each of those mapped over it pulls the few items around its own.

Airflow lets a mapped task pull the whole list to take one item of it: with a thousand jobs a gigabyte in all.
So the list is there a second time, in parts. Whoever knows nothing of those pulls the list, as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from airflow.sdk import BaseOperator, Context, TaskInstanceState
from airflow.sdk.exceptions import AirflowFailException

#: Items of a part: each part is one more request of the task that makes them.
SIZE = 8


def hand_out(context: Context, result: Any) -> None:
    """Push the parts of the list that a task returns.

    :raises AirflowFailException: as :func:`check_instances`.
    """
    check_instances(context, result)
    for first in range(0, len(result or ()), SIZE):
        context["ti"].xcom_push(key(first), result[first : first + SIZE])


def check_instances(context: Context, result: Any) -> None:
    """Refuse to go on where Airflow has removed instances of tasks that are mapped over the list.

    It does so where a DAG run is cleared while it runs and its DAG has changed, by how many there were to be
    before, and never runs them: their jobs, or trials, would be missing.

    :raises AirflowFailException: naming them, and what helps.
    """
    task: Any = context.get("task")
    if not result or task is None or not task.has_dag():
        return
    mapped = [name for name in sorted(task.downstream_task_ids) if _is_mapped_over(task, name)]
    if not mapped:
        return
    ti: Any = context["ti"]
    found = ti.get_task_states(dag_id=ti.dag_id, task_ids=mapped, run_ids=[ti.run_id]).get(ti.run_id, {})
    removed = [
        f"{name} [{index}]"
        for name in mapped
        for index in range(len(result))
        if found.get(f"{name}_{index}") == TaskInstanceState.REMOVED
    ]
    if removed:
        raise AirflowFailException(
            f"Airflow has removed {', '.join(removed[:5])}{', ...' if removed[5:] else ''} and will not run "
            "what is mapped there: it does so where a DAG run is cleared while it runs and its DAG has "
            "changed. Clear the DAG run once more: then all of it runs"
        )


def _is_mapped_over(task: Any, name: str) -> bool:
    other = task.dag.get_task(name)
    return other.is_mapped and task in other.iter_mapped_dependencies()


class ListingOperator(BaseOperator):
    """A task that returns a list to be mapped over."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"post_execute": hand_out, **kwargs})


class OnlyItem(Sequence[Any]):
    """As much of a list as its one item at ``index`` needs."""

    def __init__(self, index: int, item: Any) -> None:
        self._index, self._item = index, item

    def __len__(self) -> int:
        return self._index + 1

    def __getitem__(self, index: Any) -> Any:
        if index != self._index:
            raise IndexError(f"only item {self._index} was pulled, not {index}")
        return self._item


def pull(context: Context, task_id: str) -> OnlyItem | None:
    """The item of the running mapped task among those of ``task_id``; None where it made no parts."""
    ti = context["ti"]
    assert ti.map_index is not None
    part = ti.xcom_pull(task_ids=task_id, key=key(ti.map_index), map_indexes=-1)
    return None if part is None else OnlyItem(ti.map_index, part[ti.map_index % SIZE])


def key(index: int) -> str:
    """The XCom with the part that has the item at ``index``."""
    return f"part_{index // SIZE}"
