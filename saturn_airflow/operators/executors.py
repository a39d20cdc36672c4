"""Which executors run a sweep: those that run each task on its node, beside the node's device locks."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from airflow.sdk import conf

from saturn_airflow.model.cluster import Node
from saturn_airflow.model.errors import InvalidSweepError

_SUPPORTED = (
    "sweeps run with the CeleryExecutor and a worker per node, or with the LocalExecutor on one machine"
)


def configured() -> dict[str, str]:
    """The executors of ``[core] executor`` by the names tasks have for them; the first is the default."""
    parts = [part.strip() for part in (conf.get("core", "executor", fallback="") or "").split(",")]
    named = [part.partition(":") if ":" in part else (part, "", part) for part in parts if part]
    return {name: what for name, _, what in named}


def celery() -> str | None:
    """The name of the executor that has queues; None where there is none."""
    return next((name for name, what in configured().items() if "Celery" in what), None)


def of_node_tasks() -> str | None:
    """The executor that tasks on a node have to ask for; None where it is the only one."""
    return celery() if len(configured()) > 1 else None


def check_executor(cluster: Iterable[Node], warn: Callable[[str], object] = lambda line: None) -> None:
    """Check that each task of a sweep will run on its node.

    :param warn: called with what is right only as long as all nodes are this machine.
    :raises InvalidSweepError: when Airflow's executor would run it elsewhere.
    """
    text = conf.get("core", "executor", fallback="")
    if conf.getboolean("core", "multi_team", fallback=False) or any(mark in text for mark in ";="):
        raise InvalidSweepError(
            "this Airflow has teams ([core] multi_team, or executors of teams), and Saturn can't tell whose "
            f"workers a node's are; {_SUPPORTED}, without teams"
        )
    if celery() is not None:
        return
    name = next(iter(configured()), "")
    if "Local" not in configured().get(name, ""):
        raise InvalidSweepError(
            f"[core] executor is {text}, which Saturn does not know to run a task on its node, beside "
            f"its device locks; {_SUPPORTED}"
        )
    nodes = list(cluster)
    if len(nodes) == 1:
        return
    names = ", ".join(node.name for node in nodes)
    if any(not node.is_cpu for node in nodes):
        raise InvalidSweepError(
            f"[core] executor is {text}, which runs all tasks on the scheduler's machine, and the sweep has "
            f"the nodes {names}; use the CeleryExecutor with a worker on each, or a cluster of one node"
        )
    warn(f"[core] executor is {text}: the CPU slots of {names} are all on this machine")
