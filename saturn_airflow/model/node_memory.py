"""How much of their machines' memory nodes have for jobs, from what each node saw of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from saturn_airflow.model import formats
from saturn_airflow.model.errors import InvalidSweepError

NODE_MEMORY = "a node's memory"
#: The part of a machine's memory that is not for jobs: for the system, workers, and what follows runs.
KEPT_FREE = 0.08
# A node of which nothing was seen for so long shares its machine with no other any more.
_FORGOTTEN_SECONDS = 7 * 86400.0
# No number of a note is larger.
_MOST = 2.0**63


@dataclass(frozen=True, kw_only=True)
class NodeMemory:
    """What a node saw of its machine's memory when it last ran something.

    :param node: its name.
    :param devices: how many it has.
    :param seen: when that was, in seconds since the epoch.
    :param limits: bytes that all processes under each limit may have together: the machine's memory, and
        those of the node's control groups. Nodes that name the same limit share it.
    """

    node: str
    devices: int
    seen: float
    limits: Mapping[str, float]

    def to_dict(self) -> dict[str, Any]:
        """This as JSON-ready data."""
        return {**formats.stamp(NODE_MEMORY), **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> NodeMemory:
        """What :meth:`to_dict` described; the caller has checked its format.

        :raises InvalidSweepError: when a value can't be right: others than Saturn may have written it.
        """
        told = cls(**formats.known_fields(cls, data))
        numbers = [told.seen, told.devices, *told.limits.values()]
        right = all(type(number) in (int, float) and 0 < number < _MOST for number in numbers)
        if not right or not isinstance(told.node, str) or type(told.devices) is not int:
            raise InvalidSweepError(f"what a node saw of its memory is {told!r:.200}")
        return told


def for_jobs(seen: Collection[NodeMemory]) -> dict[str, float]:
    """Bytes that the jobs of each node may have: of each limit, the part of its devices among those of all
    nodes that share it, and of these the least."""
    found = {}
    for own in seen:
        shares = [
            most * own.devices / sum(other.devices for other in seen if _shares(other, own, limit))
            for limit, most in own.limits.items()
        ]
        if shares:
            found[own.node] = (1 - KEPT_FREE) * min(shares)
    return found


def _shares(other: NodeMemory, own: NodeMemory, limit: str) -> bool:
    """Whether a node counts among those that share a limit; each node does for its own."""
    return other is own or (limit in other.limits and other.seen > own.seen - _FORGOTTEN_SECONDS)
