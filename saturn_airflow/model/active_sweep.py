"""A sweep that is measured or planned and has not ended, as all of a deployment may know it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from saturn_airflow.model import formats
from saturn_airflow.model.cluster import Node
from saturn_airflow.model.sharing import SharedSweep

ACTIVE_SWEEP = "an active sweep"

# Of a file's name on Linux.
_LONGEST_NAME = 255


@dataclass(frozen=True, kw_only=True)
class ActiveSweep:
    """What its plan said of it; until it has one, which trials were listed.

    :param folder: where it keeps what its jobs write, below Saturn's home.
    :param made: when it was planned, or its trials were listed, in seconds since the epoch.
    :param nodes: those that it was planned with.
    :param law: of the errors of its estimates, as JSON-ready data; None where nothing is known of it.
    :param sweep: its jobs, or its trials, none begun, each bound to the node that the plan gave it.
    """

    dag_id: str
    run_id: str
    folder: str
    made: float
    nodes: tuple[Node, ...]
    sweep: SharedSweep
    law: Mapping[str, Any] | None = None

    @property
    def key(self) -> str:
        """What no other sweep has."""
        return self.sweep.name

    def to_dict(self) -> dict[str, Any]:
        """This sweep as JSON-ready data."""
        return {
            **formats.stamp(ACTIVE_SWEEP),
            "dag_id": self.dag_id,
            "run_id": self.run_id,
            "folder": self.folder,
            "made": self.made,
            "nodes": [node.to_dict() for node in self.nodes],
            "sweep": self.sweep.to_dict(),
            "law": self.law,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: object) -> ActiveSweep:
        """The sweep that :meth:`to_dict` described.

        :param where: it is from.
        :raises NewerFormatError: when a newer version wrote it.
        :raises ValueError: when it is damaged.
        """
        try:
            formats.check(data, ACTIVE_SWEEP, where)
            return cls(
                dag_id=str(data["dag_id"]),
                run_id=str(data["run_id"]),
                folder=_inside(data["folder"]),
                made=float(data["made"]),
                nodes=tuple(Node(**formats.known_fields(Node, node)) for node in data["nodes"]),
                sweep=SharedSweep.from_dict(data["sweep"]),
                law=data.get("law"),
            )
        except (KeyError, TypeError, AttributeError, StopIteration, OverflowError) as error:
            raise ValueError(f"no active sweep: {error}") from None


def _inside(folder: Any) -> str:
    """A folder of Saturn's home, as :attr:`ActiveSweep.folder` has it.

    :raises ValueError: for what leads out of it, or can't be a folder.
    """
    path = PurePosixPath(folder)
    if path.is_absolute() or ".." in path.parts or any(len(part) > _LONGEST_NAME for part in path.parts):
        raise ValueError(f"{folder!r:.80} is no folder of a sweep")
    return str(path)
