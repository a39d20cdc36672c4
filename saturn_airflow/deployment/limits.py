"""Whether Airflow lets as many tasks run at once as a sweep has."""

from __future__ import annotations

from collections.abc import Iterator

from saturn_airflow.deployment.findings import Deployment, Finding
from saturn_airflow.model.cluster import Cluster, Node

#: Seconds after which a lost message should be noticed. Redis loses what it hands to a worker in the instant
#: that the worker is killed; only a timeout tells Airflow.
LONGEST_LOST = 120.0
#: Seconds that a node may take to come back, at least.
SHORTEST_AWAY = 600.0


def check_limits(deployment: Deployment) -> Iterator[Finding]:
    """Airflow lets as many tasks run at once as there are devices, and those that wait behind them."""
    if deployment.cluster is None:
        return
    found = list(_low_limits(deployment, deployment.cluster))
    total = sum(map(tasks_of, deployment.cluster))
    yield from found or [Finding("limits", "ok", f"{total} tasks of a sweep may run at once")]


def tasks_of(node: Node) -> int:
    """How many tasks of one sweep run on a node at once: one for each device, and two that wait."""
    return node.devices + 2


def _pools_without_processes(deployment: Deployment) -> Iterator[Finding]:
    """Workers whose tasks run one at a time, or in threads, in which Airflow's can't run."""
    for worker, kind in sorted(deployment.kinds.items()):
        if kind not in ("", "prefork"):
            text = f"{worker} runs tasks by Celery's pool {kind!r}; a sweep needs a process for each"
            yield Finding("limits", "problem", text, "set [celery] pool to prefork there")


def _low_limits(deployment: Deployment, cluster: Cluster) -> Iterator[Finding]:
    """What is too low for a sweep over all nodes: of workers, of Airflow, of Celery."""
    from airflow.sdk import conf

    yield from _pools_without_processes(deployment)
    for node in cluster:
        need = tasks_of(node)
        slots = deployment.slots(node.queue)
        if 0 < slots < need:
            text = f"the worker of {node.name} runs {slots} tasks at once; one sweep uses {need}"
            fix = (
                f"airflow celery worker --queues {node.queue} --concurrency {need} (or more), "
                "and then `saturn pools`"
            )
            yield Finding("limits", "problem", text, fix)
    total = sum(map(tasks_of, cluster))
    for section, option, usual in (("core", "parallelism", 32), ("core", "max_active_tasks_per_dag", 16)):
        limit = conf.getint(section, option, fallback=usual)
        if limit < total:
            text = f"[{section}] {option} is {limit}; a sweep over all nodes has {total} tasks at once"
            yield Finding("limits", "warning", text, f"set [{section}] {option} to {total} or more")
    if deployment.celery:
        yield from _lost_messages(deployment)
        options = conf.getsection("celery_broker_transport_options") or {}
        hours = float(options.get("visibility_timeout") or 86400) / 3600
        if hours < 24 * 7:
            text = f"visibility_timeout is {hours:.0f} h; a task that runs longer is handed out again"
            fix = "set [celery_broker_transport_options] visibility_timeout above the longest training"
            yield Finding("limits", "warning", text, fix)


def _lost_messages(deployment: Deployment) -> Iterator[Finding]:
    """How long Airflow waits for a task of which no worker knows, and whether workers make such tasks."""
    from airflow.sdk import conf

    forgetful = [name for name, said in deployment.nodes.items() if said.get("waits_for_results") is False]
    if forgetful:
        text = f"{', '.join(forgetful)}: tasks taken while the database of Celery's results is away are lost"
        fix = 'add "result_backend_always_retry": true to [celery] extra_celery_config there'
        yield Finding("limits", "warning", text, fix)
    if not conf.get("celery", "broker_url", fallback="").startswith(("redis", "sentinel")):
        return
    # Airflow looks every `looks` seconds for tasks that have been queued for `waits`, and queues each again
    # `again` times before it fails.
    waits = conf.getfloat("scheduler", "task_queued_timeout", fallback=600.0)
    looks = conf.getfloat("scheduler", "task_queued_timeout_check_interval", fallback=120.0)
    again = conf.getint("scheduler", "num_stuck_in_queued_retries", fallback=2)
    text = ""
    if waits + looks > LONGEST_LOST:
        text = (
            f"a task whose message is lost with its killed worker is queued again after {waits + looks:.0f} s"
        )
    elif waits * (1 + again) < SHORTEST_AWAY:
        text = f"a task fails after {waits * (1 + again):.0f} s in queues, such as while its node starts anew"
    if text:
        fix = (
            "set [scheduler] task_queued_timeout = 60, task_queued_timeout_check_interval = 10, "
            "num_stuck_in_queued_retries = 29"
        )
        yield Finding("limits", "warning", text, fix)
