"""A planning problem: nodes, and for each job the strategies it could run under with their seconds."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from saturn_airflow.model import json_text
from saturn_airflow.model.cluster import Cluster, Node
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.plain_numbers import is_number


@dataclass(frozen=True)
class Option:
    """One strategy of one job, as the planner sees it.

    :param technique: its name.
    :param devices: how many devices it takes, all of one node.
    :param seconds: by kind of device, the seconds that training the whole job takes, set-up included.
    :param setup: seconds of them that are set-up, to be paid again whenever the job is launched anew.
    """

    technique: str
    devices: int
    seconds: Mapping[str, float]
    setup: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """This strategy as JSON-ready data."""
        entry = {"technique": self.technique, "devices": self.devices, "seconds": dict(self.seconds)}
        return {**entry, "setup": self.setup} if self.setup else entry


class Way(NamedTuple):
    """A strategy on devices of one kind.

    :param devices: how many.
    :param setup: seconds, see :class:`Option`.
    :param net: seconds of training the whole job, without the set-up.
    """

    devices: int
    net: float
    setup: float
    option: Option

    def seconds(self, left: float) -> float:
        """What a job takes that is launched anew with this share of its batches left."""
        return self.setup + left * self.net

    def area(self, left: float) -> float:
        """The device-seconds of that."""
        return self.devices * self.seconds(left)


@dataclass(frozen=True)
class PlannedJob:
    """One job of a planning problem.

    :param options: at least one.
    :param nodes: names of the nodes it may run on; None for all.
    :param release: seconds from the plan's start before which it may not start.
    :param weight: what it counts for in the mean completion time.
    """

    name: str
    options: tuple[Option, ...]
    nodes: tuple[str, ...] | None = None
    release: float = 0.0
    weight: float = 1.0

    @cached_property
    def ways(self) -> dict[str, tuple[Way, ...]]:
        """By kind of device, the Pareto strategies: narrow first, and each faster than all before it."""
        found: dict[str, tuple[Way, ...]] = {}
        for kind in {kind for option in self.options for kind in option.seconds}:
            own = [o for o in self.options if kind in o.seconds]
            kept: list[Way] = []
            for o in sorted(own, key=lambda o: (o.devices, o.seconds[kind], o.technique)):
                if not kept or o.seconds[kind] < kept[-1].net + kept[-1].setup:
                    kept.append(Way(o.devices, o.seconds[kind] - o.setup, o.setup, o))
            found[kind] = tuple(kept)
        return found

    def to_dict(self) -> dict[str, Any]:
        """This job as JSON-ready data."""
        entry: dict[str, Any] = {
            "name": self.name,
            "strategies": [option.to_dict() for option in self.options],
        }
        if self.nodes is not None:
            entry["nodes"] = list(self.nodes)
        if self.release:
            entry["release"] = self.release
        if self.weight != 1:
            entry["weight"] = self.weight
        return entry

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PlannedJob:
        """The job that :meth:`to_dict` described.

        :raises InvalidSweepError: when something is missing, or of the wrong type.
        """
        _check_mapping(data, "the job", ("name", "strategies"))
        return _job(data, f"job {data['name']!r}")


@dataclass(frozen=True)
class Problem:
    """The SPASE problem (Saturn, VLDB 2024): choose for each job one option, node, devices and start.

    :param free: by node, when each of its devices becomes free, in seconds from the plan's start; nodes
        that are not named are free.
    """

    name: str
    nodes: tuple[Node, ...]
    jobs: tuple[PlannedJob, ...] = field(default_factory=tuple)
    free: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        Cluster(*self.nodes)
        if not self.jobs:
            raise InvalidSweepError(f"problem {self.name!r} has no jobs")
        kinds = {node.kind for node in self.nodes}
        node_names = {node.name for node in self.nodes}
        self._check_free()
        seen: set[str] = set()
        for job in self.jobs:
            what = f"job {job.name!r}"
            if job.name in seen:
                raise InvalidSweepError(f"two jobs are named {job.name!r}; every job needs a name of its own")
            seen.add(job.name)
            if not job.options:
                raise InvalidSweepError(f"{what} has no strategy; give at least one")
            for value, word in ((job.release, "release"), (job.weight, "weight")):
                if not is_number(value) or not 0 <= value < math.inf:
                    raise InvalidSweepError(f"{what}: {word} is {value!r}; give a finite number, 0 or more")
            for node in job.nodes or ():
                if node not in node_names:
                    raise InvalidSweepError(
                        f"{what} is bound to node {node!r}; there are {', '.join(sorted(node_names))}"
                    )
            for option in job.options:
                if (
                    not isinstance(option.devices, int)
                    or isinstance(option.devices, bool)
                    or option.devices < 1
                ):
                    raise InvalidSweepError(
                        f"{what}: {option.technique} on {option.devices!r} devices; give at least 1"
                    )
                for kind, seconds in option.seconds.items():
                    if kind not in kinds:
                        raise InvalidSweepError(
                            f"{what}: {option.technique} has seconds for kind {kind!r}; "
                            f"the nodes are of kind {', '.join(sorted(kinds))}"
                        )
                    if not is_number(seconds) or not 0 < seconds < math.inf:
                        raise InvalidSweepError(
                            f"{what}: {option.technique} on {option.devices} devices takes {seconds!r} "
                            "seconds; seconds are finite and above 0"
                        )
                shortest = min(option.seconds.values(), default=math.inf)
                if not is_number(option.setup) or not 0 <= option.setup < shortest:
                    raise InvalidSweepError(
                        f"{what}: {option.technique} has a setup of {option.setup!r} seconds; "
                        "give 0 or more, and less than its seconds"
                    )
            if not any(self.fits(job, option, node) for option in job.options for node in self.nodes):
                needs = sorted({(option.devices, kind) for option in job.options for kind in option.seconds})
                raise InvalidSweepError(
                    f"{what} fits on no node: it needs "
                    + " or ".join(f"{devices} x {kind}" for devices, kind in needs)
                    + (f" on {' or '.join(job.nodes)}" if job.nodes else "")
                    + "; there is "
                    + ", ".join(f"{node.name} with {node.devices} x {node.kind}" for node in self.nodes)
                )

    def _check_free(self) -> None:
        devices = {node.name: node.devices for node in self.nodes}
        for name, moments in self.free.items():
            if name not in devices:
                raise InvalidSweepError(
                    f"there is no node {name!r} to be free; there are {', '.join(devices)}"
                )
            if len(moments) != devices[name]:
                raise InvalidSweepError(
                    f"node {name!r} has {devices[name]} devices, and 'free' of {len(moments)}; give the "
                    "seconds of each"
                )
            if wrong := [at for at in moments if not is_number(at) or not 0 <= at < math.inf]:
                raise InvalidSweepError(
                    f"node {name!r}: a device is free at {wrong[0]!r}; give finite seconds, 0 or more"
                )

    def free_of(self, node: Node) -> tuple[float, ...]:
        """When each device of ``node`` becomes free, in the order of their numbers."""
        return tuple(self.free.get(node.name, (0.0,) * node.devices))

    @staticmethod
    def fits(job: PlannedJob, option: Option, node: Node) -> bool:
        """Whether ``job`` may run under ``option`` on ``node``."""
        return (
            option.devices <= node.devices
            and node.kind in option.seconds
            and (job.nodes is None or node.name in job.nodes)
        )

    def to_dict(self) -> dict[str, Any]:
        """This problem as JSON-ready data, in the format of planning problem files."""
        nodes: list[dict[str, Any]] = []
        for n in self.nodes:
            nodes.append({"name": n.name, "devices": n.devices, "kind": n.kind})
            if any(moments := self.free_of(n)):
                nodes[-1]["free"] = list(moments)
        return {"name": self.name, "nodes": nodes, "jobs": [job.to_dict() for job in self.jobs]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Problem:
        """The problem that :meth:`to_dict` described.

        :raises InvalidSweepError: when something is missing, of the wrong type, or can't be planned.
        """
        what = "the planning problem"
        _check_mapping(data, what, ("nodes", "jobs"))
        nodes, free = [], {}
        for number, node in enumerate(_list(data["nodes"], f"'nodes' of {what}"), start=1):
            _check_mapping(node, _called(node, "node", number), ("name", "devices", "kind"))
            nodes.append(Node(node["name"], node["devices"], node["kind"]))
            if "free" in node:
                free[node["name"]] = tuple(_list(node["free"], f"'free' of {_called(node, 'node', number)}"))
        jobs = []
        for number, job in enumerate(_list(data["jobs"], f"'jobs' of {what}"), start=1):
            _check_mapping(job, _called(job, "job", number), ("name", "strategies"))
            jobs.append(_job(job, _called(job, "job", number)))
        return cls(_text(data.get("name", "problem"), f"'name' of {what}"), tuple(nodes), tuple(jobs), free)

    @classmethod
    def read(cls, path: str | Path) -> Problem:
        """Read a planning problem from a JSON file.

        :raises InvalidSweepError: when the file can't be read, is no JSON, or holds no valid problem.
        """
        return cls.from_dict(json_text.read(path))


def _job(data: Mapping[str, Any], what: str) -> PlannedJob:
    options = []
    for number, strategy in enumerate(_list(data["strategies"], f"'strategies' of {what}"), start=1):
        called = f"strategy {number} of {what}"
        _check_mapping(strategy, called, ("technique", "devices", "seconds"))
        if not isinstance(strategy["seconds"], Mapping):
            raise InvalidSweepError(
                f"{called} has seconds={strategy['seconds']!r:.80}; give them by kind of device, such as "
                '{"a100": 120}'
            )
        options.append(
            Option(
                _text(strategy["technique"], f"'technique' of {called}"),
                strategy["devices"],
                dict(strategy["seconds"]),
                strategy.get("setup", 0.0),
            )
        )
    nodes = _list(data["nodes"], f"'nodes' of {what}") if data.get("nodes") else None
    return PlannedJob(
        _text(data["name"], f"'name' of {what}"),
        tuple(options),
        None if nodes is None else tuple(_text(node, f"a node of {what}") for node in nodes),
        data.get("release", 0.0),
        data.get("weight", 1.0),
    )


def _called(data: Any, what: str, number: int) -> str:
    """What messages call a node or a job: by its name, or as which of them it is."""
    name = data.get("name") if isinstance(data, Mapping) else None
    return f"{what} {name!r}" if isinstance(name, str) else f"{what} {number}"


def _check_mapping(data: Any, what: str, needs: Sequence[str]) -> None:
    if not isinstance(data, Mapping):
        raise InvalidSweepError(
            f"{what} is a {type(data).__name__}; it has to be a mapping with {', '.join(needs)}"
        )
    for name in needs:
        if name not in data:
            likely = difflib.get_close_matches(name, [str(key) for key in data if key not in needs], 1)
            misspelt = f"; is {likely[0]!r} meant to be it?" if likely else ""
            raise InvalidSweepError(f"{what} lacks {name!r}{misspelt}")


def _list(data: Any, what: str) -> list[Any]:
    if not isinstance(data, list | tuple):
        raise InvalidSweepError(f"{what} is a {type(data).__name__}; it has to be a list")
    return list(data)


def _text(data: Any, what: str) -> str:
    if not isinstance(data, str):
        raise InvalidSweepError(f"{what} is {data!r:.80}; it has to be text")
    if not data.isprintable():
        raise InvalidSweepError(f"{what} is {data!r:.80}; it may have no control characters")
    return data
