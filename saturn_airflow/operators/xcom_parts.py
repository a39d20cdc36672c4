"""Of the list that a task returns, each of those mapped over it pulls the few items around its own.

Airflow lets a mapped task pull the whole list to take one item of it: with a thousand jobs a gigabyte in all.
So the list is there a second time, in parts. Whoever knows nothing of those pulls the list, as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from airflow.sdk import BaseOperator, Context

#: Items of a part: each part is one more request of the task that makes them.
SIZE = 8


def hand_out(context: Context, result: Any) -> None:
    """Push the parts of the list that a task returns."""
    for first in range(0, len(result or ()), SIZE):
        context["ti"].xcom_push(key(first), result[first : first + SIZE])


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
