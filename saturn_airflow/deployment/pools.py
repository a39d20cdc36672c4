"""A pool per node, where tasks wait for a slot of the node's worker.

Where a worker has no slot left, tasks stay in Celery's queue, and Airflow fails what is there for longer than
``[scheduler] task_queued_timeout``. What waits for a slot of a pool is in no queue, and may wait for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from saturn_airflow.deployment.findings import Deployment, Finding
from saturn_airflow.deployment.limits import tasks_of
from saturn_airflow.model.cluster import Node
from saturn_airflow.operators import airflow_internals
from saturn_airflow.operators.inventory import pool_of, record_pools, recorded_pools

_MEND = "run `saturn pools` on the machine of the scheduler"


def existing() -> dict[str, int]:
    """The slots of each pool that Airflow's database has, by its name."""
    return {str(pool.pool): int(pool.slots) for pool in airflow_internals.pools().get_pools()}


def make(nodes: Iterable[Node], slots: Mapping[str, int], usual: int | None = None) -> dict[str, int]:
    """Make each node's pool, or give it the right size; the slots of each, by the pool's name.

    :param slots: how many tasks run at once for each queue, as far as workers have said.
    :param usual: slots where no worker has; None for what one sweep uses.
    """
    there = existing()
    kept = {name: there[name] for name in recorded_pools() if name in there}
    made = {}
    for node in nodes:
        size = slots.get(node.queue) or usual or tasks_of(node)
        what = f"Tasks of sweeps on the node {node.name}: as many as its worker runs at once"
        airflow_internals.pools().create_or_update_pool(node.queue, size, what, include_deferred=False)
        made[node.queue] = size
    record_pools({**kept, **made})
    return made


def check_pools(deployment: Deployment) -> Iterator[Finding]:
    """Each node has a pool, no larger than its worker."""
    if deployment.cluster is None or not deployment.celery:
        return
    there = existing()
    found = [finding for node in deployment.cluster for finding in _check_pool(node, there, deployment)]
    sizes = ", ".join(f"{node.queue} ({there.get(node.queue)})" for node in deployment.cluster)
    yield from found or [Finding("pools", "ok", f"nodes have pools: {sizes}")]


def _check_pool(node: Node, there: Mapping[str, int], deployment: Deployment) -> Iterator[Finding]:
    size, slots, named = there.get(node.queue), deployment.slots(node), pool_of(node) is not None
    if size is None:
        what = "its tasks name one, and never start" if named else "tasks may be lost in its queue"
        yield Finding("pools", "problem", f"{node.name} has no pool: {what}", _MEND)
    elif not named:
        yield Finding("pools", "problem", f"{node.name} has a pool that no sweep knows of", _MEND)
    elif 0 < slots < size:
        text = f"the pool of {node.name} has {size} slots, its worker {slots}: tasks may be lost in its queue"
        yield Finding("pools", "problem", text, _MEND)
    elif size < tasks_of(node):
        text = f"the pool of {node.name} has {size} slots; one sweep uses {tasks_of(node)}"
        yield Finding("pools", "warning", text, _MEND)
