"""The machines a sweep may use."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from saturn_airflow.model import formats
from saturn_airflow.model.arguments import checked
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.plain_numbers import is_number

# Airflow task ids allow these, and each node becomes part of one.
_NAME = re.compile(r"^[A-Za-z0-9_.-]{1,60}$")


@checked("node")
@dataclass(frozen=True)
class Node:
    """A machine with a Celery worker.

    :param name: its name; its tasks go to the queue ``saturn.<name>`` unless ``queue`` says otherwise.
    :param devices: how many devices it has, numbered from 0.
    :param kind: what its devices are: ``"cpu"`` for CPU slots, otherwise a name of the GPU type. Devices
        of one kind are taken to be equally fast.
    :param queue: the Celery queue its worker listens on.
    :param host_memory: GiB of its memory that jobs may use, of which each device has an equal part: no plan
        gives a job a strategy that took more than its devices' part. None for what the node itself sees of
        its machine's memory, or its container's.
    """

    name: str
    devices: int
    kind: str = "gpu"
    queue: str = ""
    host_memory: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise InvalidSweepError(
                f"node {self.name!r}: a node's name has 1 to 60 letters, digits, dots, dashes or underscores"
            )
        if not isinstance(self.devices, int) or isinstance(self.devices, bool) or self.devices < 1:
            raise InvalidSweepError(
                f"node {self.name!r}: devices is {self.devices!r}; give the number of its GPUs or CPU slots"
            )
        if not isinstance(self.kind, str) or not self.kind or not self.kind.isprintable():
            raise InvalidSweepError(
                f"node {self.name!r}: kind is {self.kind!r}; give a name such as 'cpu' or 'a100'"
            )
        if self.kind != "cpu" and self.kind.strip().lower() == "cpu":
            raise InvalidSweepError(f"node {self.name!r}: kind is {self.kind!r}; did you mean 'cpu'?")
        memory = self.host_memory
        if memory is not None and (not is_number(memory) or not 0 < memory < math.inf):
            raise InvalidSweepError(
                f"node {self.name!r}: host_memory is {memory!r}; give the GiB that jobs may use, "
                "or leave it out"
            )
        if not self.queue:
            object.__setattr__(self, "queue", f"saturn.{self.name}")
        if not isinstance(self.queue, str) or not self.queue.isprintable():
            raise InvalidSweepError(f"node {self.name!r}: queue is {self.queue!r:.80}; give a queue's name")

    @property
    def is_cpu(self) -> bool:
        """Whether its devices are CPU slots."""
        return self.kind == "cpu"

    def to_dict(self) -> dict[str, Any]:
        """This node as JSON-ready data."""
        entry = {"name": self.name, "devices": self.devices, "kind": self.kind, "queue": self.queue}
        return entry if self.host_memory is None else {**entry, "host_memory": self.host_memory}

    @classmethod
    def parse(cls, text: str) -> Node:
        """The node of ``name:devices``, ``name:devices:kind`` or ``name:devices:kind:queue``.

        :raises InvalidSweepError: when it is none of these.
        """
        name, *rest = (part.strip() for part in text.split(":"))
        if not 1 <= len(rest) <= 3 or not rest[0].isdigit():
            raise InvalidSweepError(
                f"{text.strip()!r} is not a node; write name:devices or name:devices:kind, as in gpu-a:8:a100"
            )
        kind, queue = [*rest[1:], *("gpu", "")[len(rest) - 1 :]]
        return cls(name, int(rest[0]), kind, queue)


@dataclass(frozen=True, init=False)
class Cluster:
    """The nodes of a sweep: ``Cluster(Node("gpu-a", devices=8), Node("gpu-b", devices=8))``."""

    nodes: tuple[Node, ...]

    def __init__(self, *nodes: Node, **unknown: object) -> None:
        if unknown:
            raise InvalidSweepError(
                f"the cluster has no {next(iter(unknown))!r}; write Cluster(Node('name', devices=...))"
            )
        if not nodes:
            raise InvalidSweepError("the cluster has no nodes; write Cluster(Node('name', devices=...))")
        for node in nodes:
            if not isinstance(node, Node):
                raise InvalidSweepError(
                    f"the cluster holds {node!r:.60}; write Cluster(Node('name', devices=...))"
                )
        names = [node.name for node in nodes]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise InvalidSweepError(f"two nodes are named {twice[0]!r}; every node needs a name of its own")
        queues = [node.queue for node in nodes]
        if shared := sorted({queue for queue in queues if queues.count(queue) > 1}):
            raise InvalidSweepError(
                f"two nodes listen on the queue {shared[0]!r}; every node needs a queue of its own"
            )
        object.__setattr__(self, "nodes", tuple(nodes))

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)

    def __getitem__(self, name: str) -> Node:
        for node in self.nodes:
            if node.name == name:
                return node
        raise InvalidSweepError(
            f"the cluster has no node {name!r}; it has {', '.join(n.name for n in self.nodes)}"
        )

    def among(self, names: Sequence[str] | None) -> tuple[str, ...] | None:
        """Those of ``names`` that are nodes here; None for None, which is all."""
        here = {node.name for node in self.nodes}
        return None if names is None else tuple(name for name in names if name in here)

    @property
    def devices(self) -> int:
        """Devices of all nodes together."""
        return sum(node.devices for node in self.nodes)

    def to_dict(self) -> dict[str, Any]:
        """This cluster as JSON-ready data."""
        return {"nodes": [node.to_dict() for node in self.nodes]}

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """The cluster of a line of configuration: ``gpu-a:8:a100, gpu-b:8:a100``; see :meth:`Node.parse`."""
        return cls(*(Node.parse(part) for part in text.split(",") if part.strip()))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Cluster:
        """The cluster that :meth:`to_dict` described."""
        return cls(*(Node(**formats.known_fields(Node, node)) for node in data["nodes"]))
