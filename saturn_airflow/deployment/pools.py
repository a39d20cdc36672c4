"""A pool per node, where tasks wait for a slot of the node's worker, and one for tasks that need no device.

Where a worker has no slot left, tasks stay in Celery's queue, and Airflow fails what is there for longer than
``[scheduler] task_queued_timeout``. What waits for a slot of a pool is in no queue, and may wait for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from saturn_airflow.deployment.findings import Deployment, Finding
from saturn_airflow.deployment.limits import tasks_of
from saturn_airflow.model.cluster import Node
from saturn_airflow.operators import airflow_internals
from saturn_airflow.operators.inventory import (
    SHORT_POOL,
    default_queue,
    pool_of,
    pool_of_short_tasks,
    record_pools,
    recorded_pools,
)

_MEND = "run `saturn pools` on the machine of the scheduler"
#: Slots for the short tasks of sweeps where no worker has said how many it runs: those of the compose file.
USUAL_SHORT = 4


def existing() -> dict[str, int]:
    """The slots of each pool that Airflow's database has, by its name."""
    return {str(pool.pool): int(pool.slots) for pool in airflow_internals.pools().get_pools()}


def make(
    nodes: Iterable[Node],
    slots: Mapping[str, int],
    usual: int | None = None,
    usual_short: int | None = None,
) -> dict[str, int]:
    """Make each node's pool and that of short tasks, or give it the right size.

    :param slots: how many tasks run at once for each queue, as far as workers have said.
    :param usual: slots where no worker has; None for what one sweep uses.
    :param usual_short: the same for the tasks that need no device.
    :returns: the slots of each pool, by its name.
    """
    there = existing()
    kept = {name: there[name] for name in recorded_pools() if name in there}
    made = {}
    for node in nodes:
        size = slots.get(node.queue) or usual or tasks_of(node)
        what = f"Tasks of sweeps on the node {node.name}: as many as its worker runs at once"
        airflow_internals.pools().create_or_update_pool(node.queue, size, what, include_deferred=False)
        made[node.queue] = size
    made[SHORT_POOL] = slots.get(default_queue()) or usual_short or USUAL_SHORT
    what = "Tasks of sweeps that need no device: as many as the workers of their queue run at once"
    airflow_internals.pools().create_or_update_pool(
        SHORT_POOL, made[SHORT_POOL], what, include_deferred=False
    )
    record_pools({**kept, **made})
    return made


def check_pools(deployment: Deployment) -> Iterator[Finding]:
    """Each node has a pool, no larger than its worker, and so have tasks that need none."""
    if deployment.cluster is None or not deployment.celery:
        return
    there = existing()
    found = [finding for node in deployment.cluster for finding in _check_pool(node, there, deployment)]
    found += _check_short_pool(there, deployment)
    sizes = ", ".join(f"{node.queue} ({there.get(node.queue)})" for node in deployment.cluster)
    text = f"nodes have pools: {sizes}; short tasks have {SHORT_POOL} ({there.get(SHORT_POOL)})"
    yield from found or [Finding("pools", "ok", text)]


def _check_short_pool(there: Mapping[str, int], deployment: Deployment) -> Iterator[Finding]:
    size, slots = there.get(SHORT_POOL), deployment.slots(default_queue())
    if size is None or pool_of_short_tasks() is None:
        text = "tasks of sweeps that need no device have no pool: many at once may be lost in their queue"
        yield Finding("pools", "problem", text, _MEND)
    elif 0 < slots < size:
        queue = default_queue()
        text = f"the pool {SHORT_POOL} has {size} slots, the worker of {queue!r} {slots}: tasks may be lost"
        yield Finding("pools", "problem", text, _MEND)


def _check_pool(node: Node, there: Mapping[str, int], deployment: Deployment) -> Iterator[Finding]:
    """What is wrong with a node's pool.

    :param there: the slots of each pool that Airflow has.
    """
    size, slots, named = there.get(node.queue), deployment.slots(node.queue), pool_of(node) is not None
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
