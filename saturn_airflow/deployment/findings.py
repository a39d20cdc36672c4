"""What `saturn doctor` looks at, and what it finds."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from saturn_airflow.model.cluster import Cluster

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """What one check saw.

    :param fix: how to mend it, where it is no ``ok``.
    """

    check: str
    level: Level
    text: str
    fix: str = ""

    def to_dict(self) -> dict[str, str]:
        """This finding as JSON-ready data."""
        return asdict(self)


@dataclass(frozen=True)
class Question:
    """When nodes were asked, in seconds since the epoch by the clock of the machine that asked them.

    :param asked: before the question was sent.
    :param answered: when the last answer had come.
    """

    asked: float
    answered: float


@dataclass
class Deployment:
    """What all checks look at; filled by the first of them.

    :ivar cluster: the nodes that are configured or announced; None where there are none.
    :ivar celery: whether tasks run on Celery's workers.
    :ivar workers: the queues of each Celery worker, by the worker's name.
    :ivar pools: how many tasks each worker runs at once.
    :ivar kinds: how each worker runs its tasks, as Celery calls it, such as ``"prefork"``.
    :ivar nodes: the survey of each node whose worker answered, by the node's name.
    :ivar question: when these were asked; None where there was nobody to ask.
    """

    cluster: Cluster | None = None
    celery: bool = True
    workers: dict[str, set[str]] = field(default_factory=dict)
    pools: dict[str, int] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    nodes: dict[str, dict[str, Any]] = field(default_factory=dict)
    question: Question | None = None

    def slots(self, queue: str) -> int:
        """How many tasks the workers of ``queue`` run at once; 0 where none has said."""
        listening = [worker for worker, queues in self.workers.items() if queue in queues]
        return sum(self.pools.get(worker, 0) for worker in listening)
