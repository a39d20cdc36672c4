"""What each node saw of its machine's memory, written down where plans are made."""

from __future__ import annotations

import json
import logging
import time

from saturn_airflow.launch import host_memory
from saturn_airflow.model import formats, json_text
from saturn_airflow.model.cluster import Node
from saturn_airflow.model.disks import write_whole
from saturn_airflow.model.errors import SaturnError
from saturn_airflow.model.node_memory import NODE_MEMORY, NodeMemory, for_jobs
from saturn_airflow.operators.context import home

log = logging.getLogger(__name__)


def record(node: Node) -> None:
    """Write down what memory this machine has, on which ``node`` is."""
    path = home() / "memory" / f"{node.name}.json"
    try:
        seen = NodeMemory(node=node.name, devices=node.devices, seen=time.time(), limits=host_memory.limits())
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(seen.to_dict()))
    except OSError as error:
        log.warning("plans are not told how much memory %s has: %s", node.name, error)


def learned() -> dict[str, float]:
    """Bytes that the jobs of each node may have, by the nodes' names, as far as that was written down."""
    found = []
    for path in sorted((home() / "memory").glob("*.json")):
        try:
            data = json_text.parse(path.read_text())
            formats.check(data, NODE_MEMORY, path)
            found.append(NodeMemory.from_dict(data))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SaturnError) as error:
            # The node writes it anew with its next trial; until then nobody counts its memory.
            log.warning("%s is left unread (%s: %s)", path, type(error).__name__, error)
    return for_jobs(found)
