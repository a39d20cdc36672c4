"""Which of its nodes a sweep plans with: not those that do not answer, nor those that are drained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from airflow.sdk import Context

from saturn_airflow.model.cluster import Cluster
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.jobs import Job
from saturn_airflow.model.settings import LEAVE_OUT, OnMissingNode
from saturn_airflow.operators.drains import drained
from saturn_airflow.operators.inventory import check_listeners

#: The XCom with the nodes that take no part: by each one's name, why.
LEFT_OUT_KEY = "left_out"


def absent(
    cluster: Cluster, on_missing_node: OnMissingNode, log: Callable[[str], object] = lambda line: None
) -> dict[str, str]:
    """The nodes that a sweep which begins now has to do without, each with the reason.

    :param on_missing_node: ``"leave_out"`` or ``"fail"``.
    :raises InvalidSweepError: when a node does not answer and that is to fail, or when no node is left.
    """
    found = {name: why for name, why in drained().items() if name in {node.name for node in cluster}}
    asked = [node for node in cluster if node.name not in found]
    if not asked:
        names = ", ".join(found)
        raise InvalidSweepError(f"all nodes of the sweep are drained; `saturn undrain {names}` undoes it")
    for node in check_listeners(asked, log, may_miss=on_missing_node == LEAVE_OUT):
        found[node.name] = f"no worker listens on its queue {node.queue!r}"
    return found


def present(cluster: Cluster, left_out: Mapping[str, str]) -> Cluster:
    """``cluster`` without the nodes that are left out."""
    return Cluster(*(node for node in cluster if node.name not in left_out))


def left_out_now(context: Context, trials_task: str, cluster: Cluster) -> dict[str, str]:
    """What :func:`absent` said when the sweep began, and what was drained since, unless that is all."""
    told: Any = context["ti"].xcom_pull(task_ids=trials_task, key=LEFT_OUT_KEY, map_indexes=-1)
    names = {node.name for node in cluster}
    told = {name: why for name, why in (told or {}).items() if name in names}
    now = {**told, **{name: why for name, why in drained().items() if name in names}}
    return told if len(now) == len(names) else now


def why_absent(job: Job, left_out: Mapping[str, str]) -> str | None:
    """Why a job that is bound to nodes has none of them; None where it has one, or is bound to none."""
    if job.nodes is None or not set(job.nodes) <= left_out.keys():
        return None
    return "; ".join(f"its node {name} takes no part: {left_out[name]}" for name in job.nodes)
