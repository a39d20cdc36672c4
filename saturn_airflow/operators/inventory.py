"""Which nodes a sweep may use where the DAG does not say, their pools, and whether a worker listens."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from pathlib import Path

from airflow.sdk import conf

from saturn_airflow.model import formats, json_text
from saturn_airflow.model.cluster import Cluster, Node
from saturn_airflow.model.disks import write_for_all
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.operators import executors, memory_records
from saturn_airflow.operators.airflow_internals import celery_app
from saturn_airflow.operators.context import home

#: For how long a node's worker is waited for as a sweep begins: it may be in the middle of its start.
PATIENCE_SECONDS = 30.0
#: For how long one that was there is waited for: it may be in the middle of a restart.
RESTART_SECONDS = 15.0
#: Where the tasks of all sweeps wait that need no device.
SHORT_POOL = "saturn"
#: Whether DAG files are read to train a job by hand, on this machine: then no nodes need be known.
READ_BY_HAND: ContextVar[bool] = ContextVar("read_by_hand", default=False)
# For how long answers to one question are waited for: Celery can't know how many come, so it always takes as
# long.
_FIRST_SECONDS, _LATER_SECONDS = 0.5, 2.0


def deployed_cluster(bound: Iterable[str] = ()) -> Cluster:
    """The nodes of this deployment: those in ``[saturn] nodes``, else those that announced themselves.

    Read when a DAG file is parsed, because the names of the nodes shape the DAG.

    :param bound: nodes that jobs are bound to; with :data:`READ_BY_HAND` they stand in where none are known.
    :raises InvalidSweepError: when there are none, or they are written wrongly.
    """
    if text := conf.get("saturn", "nodes", fallback=""):
        try:
            return Cluster.parse(text)
        except InvalidSweepError as error:
            raise InvalidSweepError(f"[saturn] nodes: {error}") from None
    if nodes := announced_nodes():
        return Cluster(*nodes)
    if READ_BY_HAND.get():
        return Cluster(*(Node(name, 1, "cpu") for name in {"this-machine", *bound}))
    raise InvalidSweepError(
        "no nodes are known; give the sweep a cluster=Cluster(Node('name', devices=...)), list them in the "
        "configuration ([saturn] nodes = gpu-a:8:a100, gpu-b:8:a100), or run "
        "`saturn devices --announce NAME` on each node before its worker starts"
    )


def announce(node: Node) -> Path:
    """Write down that ``node`` exists, which is this machine, where the DAG processor finds it; the file."""
    path = _nodes_folder() / f"{node.name}.json"
    write_for_all(path, json.dumps(node.to_dict()))
    memory_records.record(node)
    return path


def announced_nodes() -> list[Node]:
    """The nodes that announced themselves, by name.

    :raises InvalidSweepError: when a file is not what :func:`announce` writes.
    """
    found = []
    for path in sorted(_nodes_folder().glob("*.json")):
        try:
            # A later version may write more of a node.
            found.append(Node(**formats.known_fields(Node, json_text.parse(path.read_text()))))
        except PermissionError as error:
            raise InvalidSweepError(f"{error.strerror}: {path}; let all users read it (chmod a+r)") from None
        except (ValueError, TypeError, AttributeError) as error:
            raise InvalidSweepError(
                f"{path} does not describe a node ({error}); remove it, "
                "or run `saturn devices --announce` again"
            ) from None
    return found


def pool_of(node: Node) -> str | None:
    """The Airflow pool in which tasks of ``node`` wait for a slot of its worker; None where it has none.

    Tasks of a pool that Airflow does not have are never started, and whoever parses a DAG file may not ask
    Airflow's database: so a pool counts once it was made and recorded.
    """
    return node.queue if node.queue in recorded_pools() else None


def pool_of_short_tasks() -> str | None:
    """The Airflow pool in which the tasks of sweeps wait that need no device; None where it was not made."""
    return SHORT_POOL if SHORT_POOL in recorded_pools() else None


def default_queue() -> str:
    """The queue of tasks that name none."""
    return str(conf.get("operators", "default_queue", fallback="default"))


def recorded_pools() -> dict[str, int]:
    """The pools that :func:`record_pools` wrote down, with their slots.

    :raises InvalidSweepError: when the file is damaged.
    """
    try:
        return dict(json_text.parse(_pools_record().read_text()))
    except FileNotFoundError:
        return {}
    except PermissionError as error:
        path = _pools_record()
        raise InvalidSweepError(f"{error.strerror}: {path}; let all users read it (chmod a+r)") from None
    except (ValueError, TypeError) as error:
        raise InvalidSweepError(
            f"{_pools_record()} is damaged ({error}); remove it and run `saturn pools` again"
        ) from None


def record_pools(slots: Mapping[str, int]) -> None:
    """Write down which pools were made, by their names, where the DAG processor finds it."""
    write_for_all(_pools_record(), json.dumps(dict(slots)))


def check_listeners(
    cluster: Iterable[Node],
    log: Callable[[str], object] = lambda line: None,
    *,
    may_miss: bool = False,
) -> list[Node]:
    """Check that a Celery worker listens on the queue of every node; other executors have no queues.

    :param may_miss: whether some may lack one.
    :returns: those.
    :raises InvalidSweepError: naming the node, its queue, and the command that starts a worker for it.
    """
    if not has_queues():
        return []
    nodes = list(cluster)
    deadline, seconds = time.monotonic() + PATIENCE_SECONDS, _FIRST_SECONDS
    while True:
        heard, trouble = set[str](), ""
        try:
            heard = queues_with_a_worker(seconds)
        except Exception as error:  # the broker may be in the middle of a restart, too
            trouble = f". The broker could not be asked: {error}"
        unserved = [node for node in nodes if node.queue not in heard]
        if not unserved:
            return []
        if time.monotonic() > deadline:
            if may_miss and len(unserved) < len(nodes):
                return unserved
            node = unserved[0]
            others = f" (nor on {', '.join(n.queue for n in unserved[1:])})" if unserved[1:] else ""
            raise InvalidSweepError(
                f"no worker listens on the queue {node.queue!r} of node {node.name!r}{others}; "
                f"start one on it: airflow celery worker --queues {node.queue}. "
                f"Queues with a worker are {', '.join(sorted(heard)) or 'none'}{trouble}"
            )
        log(f"No worker listens on {', '.join(node.queue for node in unserved)} yet{trouble}")
        time.sleep(1.0)
        seconds = _LATER_SECONDS


def warn_of_no_pool(cluster: Iterable[Node], warn: Callable[[str], object]) -> None:
    """Say which nodes have no pool for their tasks to wait in; other executors than Celery need none."""
    if not has_queues():
        return
    without = [node.name for node in cluster if pool_of(node) is None]
    if pool_of_short_tasks() is None:
        without.append("tasks that need no device")
    if without:
        warn(
            f"{', '.join(without)}: no pool. What several sweeps queue beyond a worker's slots Airflow fails "
            "after [scheduler] task_queued_timeout; run `saturn pools` on the scheduler's machine"
        )


def lost(
    cluster: Iterable[Node], suspects: Iterable[Node] | None = None, seconds: float = RESTART_SECONDS
) -> list[Node]:
    """Nodes on whose queue no Celery worker listens, nor starts to within ``seconds``.

    Empty where that can't be told: with other executors, without a broker, when no node's worker answers at
    all.

    :param suspects: ask after these nodes only.
    """
    nodes = list(cluster)
    asked = nodes if suspects is None else list(suspects)
    if not has_queues():
        return []
    heard = set[str]()
    deadline = time.monotonic() + seconds
    while not heard.issuperset(node.queue for node in asked) and time.monotonic() < deadline:
        with contextlib.suppress(Exception):  # the broker may be in the middle of a restart, too
            heard |= queues_with_a_worker()
        time.sleep(0.1)
    if not any(node.queue in heard for node in nodes):
        return []
    return [node for node in asked if node.queue not in heard]


def queues_with_a_worker(seconds: float = _LATER_SECONDS) -> set[str]:
    """The Celery queues that a worker listens on now.

    :param seconds: how long workers have to answer.
    """
    answers = celery_app().control.inspect(timeout=seconds).active_queues() or {}
    return {str(queue["name"]) for queues in answers.values() for queue in queues}


def worker_slots() -> dict[str, int]:
    """How many tasks run at once for each Celery queue: those of all its workers that answer."""
    inspect = celery_app().control.inspect(timeout=_LATER_SECONDS)
    answers, stats = inspect.active_queues() or {}, inspect.stats() or {}
    found: dict[str, int] = {}
    for worker, queues in answers.items():
        slots = int((stats.get(worker, {}).get("pool") or {}).get("max-concurrency") or 0)
        for queue in queues:
            found[str(queue["name"])] = found.get(str(queue["name"]), 0) + slots
    return found


def has_queues() -> bool:
    """Whether tasks go to the queue of their node."""
    return executors.celery() is not None


def _nodes_folder() -> Path:
    return home() / "nodes"


def _pools_record() -> Path:
    return home() / "pools.json"
