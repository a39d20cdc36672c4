"""Files of sweeps that arrive, for ``saturn simulate --arrivals``. docs/sharing.md has their format."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saturn_airflow.model import formats, json_text
from saturn_airflow.model.cluster import Cluster, Node
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.plain_numbers import is_number
from saturn_airflow.model.problem import PlannedJob, Problem
from saturn_airflow.model.sharing import SharedJob, SharedSweep, least_seconds
from saturn_airflow.sharing.replay import NodeChange


@dataclass(frozen=True)
class ArrivalsFile:
    """Sweeps that arrive at a cluster.

    :param sweeps: in order of arrival. Times are seconds from the beginning.
    :param shares: by team.
    :param changes: nodes that go, and come.
    """

    name: str
    nodes: tuple[Node, ...]
    sweeps: tuple[SharedSweep, ...]
    shares: Mapping[str, float]
    changes: tuple[NodeChange, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """These arrivals as JSON-ready data."""
        return {
            **formats.stamp("a file of arrivals"),
            "name": self.name,
            "nodes": [{"name": n.name, "devices": n.devices, "kind": n.kind} for n in self.nodes],
            "shares": dict(self.shares),
            "changes": [
                {"at": c.at, "comes": c.node.name}
                if isinstance(c.node, Node)
                else {"at": c.at, "goes": c.node}
                for c in self.changes
            ],
            "sweeps": [
                {
                    "name": sweep.name,
                    "arrives": sweep.arrived,
                    "priority": sweep.priority,
                    "team": sweep.team,
                    "preempt": sweep.preempt,
                    **({} if sweep.deadline is None else {"deadline": sweep.deadline}),
                    "jobs": [job.job.to_dict() for job in sweep.jobs],
                }
                for sweep in self.sweeps
            ],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: object = "the file") -> ArrivalsFile:
        """The arrivals that :meth:`to_dict` described.

        :raises InvalidSweepError: when something is missing, of the wrong type, or can't be.
        :raises NewerFormatError: when a newer version wrote it.
        """
        try:
            formats.check(data, "a file of arrivals", where)
            nodes = tuple(Node(n["name"], n["devices"], n["kind"]) for n in data["nodes"])
            Cluster(*nodes)
            sweeps = tuple(_sweep(entry, nodes) for entry in data["sweeps"])
            changes = tuple(_change(entry, nodes) for entry in data.get("changes", ()))
            shares = data.get("shares", {})
        except KeyError as error:
            raise InvalidSweepError(f"{where} lacks {error}") from None
        except (TypeError, AttributeError) as error:
            raise InvalidSweepError(f"{where} is not in the expected form: {error}") from None
        if not isinstance(shares, Mapping):
            raise InvalidSweepError(f"{where}: shares is {shares!r:.80}; give numbers by team")
        names = [sweep.name for sweep in sweeps]
        if not names:
            raise InvalidSweepError(f"{where} has no sweeps; give at least one")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise InvalidSweepError(
                f"{where}: two sweeps are named {twice[0]!r}; every sweep needs a name of its own"
            )
        sweeps = tuple(sorted(sweeps, key=lambda sweep: (sweep.arrived, sweep.name)))
        return cls(str(data.get("name", "arrivals")), nodes, sweeps, dict(shares), changes)

    @classmethod
    def read(cls, path: str | Path) -> ArrivalsFile:
        """Read a file of arrivals.

        :raises InvalidSweepError: when it can't be read, is no JSON, or holds no valid arrivals.
        """
        data = json_text.read(path)
        if not isinstance(data, dict):
            raise InvalidSweepError(f"{path} is not in the expected form: it holds no object")
        return cls.from_dict(data, path)


def _sweep(entry: Mapping[str, Any], nodes: tuple[Node, ...]) -> SharedSweep:
    name = entry["name"]
    if not isinstance(name, str) or not name:
        raise InvalidSweepError(f"a sweep is named {name!r}; give a text")
    jobs = tuple(PlannedJob.from_dict(job) for job in entry["jobs"])
    # Made for its checks alone.
    Problem(f"sweep {name}", nodes, jobs)
    if released := [job.name for job in jobs if job.release]:
        raise InvalidSweepError(
            f"sweep {name!r}: job {released[0]!r} has a release, which can't be here; leave it out"
        )
    arrives, deadline = _seconds(entry["arrives"], name, "arrives"), entry.get("deadline")
    priority = entry.get("priority", 0)
    if not is_number(priority) or not math.isfinite(priority):
        raise InvalidSweepError(f"sweep {name!r}: priority is {priority!r}; give a number")
    if not isinstance(entry.get("preempt", True), bool):
        raise InvalidSweepError(f"sweep {name!r}: preempt is {entry['preempt']!r}; give true or false")
    return SharedSweep(
        name,
        tuple(map(SharedJob, jobs)),
        arrived=arrives,
        alone=least_seconds(jobs, nodes),
        priority=float(priority),
        team=str(entry.get("team", "")),
        deadline=None if deadline is None else _seconds(deadline, name, "deadline"),
        preempt=entry.get("preempt", True),
    )


def _seconds(value: Any, sweep: str, what: str) -> float:
    if not is_number(value) or not 0 <= value < math.inf:
        raise InvalidSweepError(f"sweep {sweep!r}: {what} is {value!r}; give seconds from the beginning")
    return float(value)


def _change(entry: Mapping[str, Any], nodes: tuple[Node, ...]) -> NodeChange:
    by_name = {node.name: node for node in nodes}
    name = entry["goes"] if "goes" in entry else entry["comes"]
    if name not in by_name:
        raise InvalidSweepError(
            f"there is no node {name!r} to change; there are {', '.join(sorted(by_name))}"
        )
    at = entry["at"]
    if not is_number(at) or not 0 <= at < math.inf:
        raise InvalidSweepError(f"node {name!r} changes at {at!r}; give seconds from the beginning")
    return NodeChange(float(at), name if "goes" in entry else by_name[name])
