"""What tasks use of Airflow and its providers that is no part of their public interface.

A test names what has moved. All is imported where it is needed, for parsing a DAG must not wait for it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from saturn_airflow.operators import xcom_parts

# Seconds between two looks whether a process has ended that has closed its sockets.
_UNTIL_ENDED = 0.02


def redact(value: Any, name: str) -> Any:
    """``value`` without what Airflow takes for a secret by its ``name``."""
    from airflow.sdk.log import redact as hide  # type: ignore[attr-defined]

    return hide(value, name)


def mask(text: str) -> None:
    """Hide ``text`` in the log of this task."""
    from airflow.sdk.log import mask_secret

    mask_secret(text)


def celery_app() -> Any:
    """The Celery application of Airflow's executor.

    :raises ImportError: where the provider is not installed.
    """
    from airflow.providers.celery.executors.celery_executor_utils import app

    return app


def skip_tasks(tasks: Sequence[Any]) -> None:
    """Have Airflow skip other tasks of this DAG run, unless they run or have ended.

    :param tasks: ids, or pairs of id and map index.
    """
    from airflow.sdk.execution_time.comms import SkipDownstreamTasks
    from airflow.sdk.execution_time.task_runner import SUPERVISOR_COMMS

    SUPERVISOR_COMMS.send(SkipDownstreamTasks(tasks=list(tasks)))


@functools.cache
def _own_item() -> type:
    from airflow.sdk.definitions.xcom_arg import PlainXComArg

    class OwnItem(PlainXComArg):
        """The list that a task returns, of which a mapped task pulls no more than it needs.

        In the serialised DAG it is an XComArg as any other.
        """

        def resolve(self, context: Any) -> Any:
            found = xcom_parts.pull(context, self.operator.task_id)
            return super().resolve(context) if found is None else found

    return OwnItem


def own_item_of(source: Any) -> Any:
    """What to map over: the list that the task ``source`` returns."""
    return _own_item()(operator=source)


def pools() -> Any:
    """Airflow's pools, as its database has them: for commands on the machine of the scheduler."""
    from airflow.models.pool import Pool

    return Pool


def stats() -> Any:
    """Airflow's own metrics (StatsD, OpenTelemetry, Datadog), as the process of a task is set up for them."""
    from airflow.sdk.observability import stats as module

    return module


def import_for_tasks() -> None:
    """Import what the processes of each task import anew: an eighth of a second of a core, and 30 MB.

    One of the two parses the DAG's file, the other talks to the API server.
    """
    import airflow.dag_processing.dagbag
    import airflow.providers.standard.operators.empty
    import airflow.sdk.bases.skipmixin
    import airflow.sdk.execution_time.cache
    import airflow.sdk.execution_time.supervisor  # noqa: F401
    from airflow.sdk import Asset

    # The first asset of a process imports what all providers know of addresses.
    Asset(name="saturn", uri="saturn://saturn")


def see_ends_at_once() -> None:
    """Have Airflow's process above a task see at once that the task's process has ended.

    It waits for the task's sockets to be closed, which the kernel does a moment before the process has ended;
    then it looks again after ``[workers] min_heartbeat_interval`` (5 s), and the worker's slot is taken until
    then.
    """
    from airflow.sdk.execution_time.supervisor import WatchedSubprocess

    look = WatchedSubprocess._service_subprocess
    if getattr(look, "sees_ends_at_once", False):
        return

    @functools.wraps(look)
    def look_soon(process: Any, max_wait_time: float, *rest: Any, **named: Any) -> Any:
        soon = max_wait_time if process._open_sockets else min(max_wait_time, _UNTIL_ENDED)
        return look(process, soon, *rest, **named)

    look_soon.sees_ends_at_once = True  # type: ignore[attr-defined]
    WatchedSubprocess._service_subprocess = look_soon  # type: ignore[assignment]


def dag_bag(place: str) -> Any:
    """The DAGs of a file or folder, and the errors of those that can't be imported."""
    from airflow.dag_processing.dagbag import DagBag

    return DagBag(place)
