"""A planning problem in the form the models read: classes of equal jobs, types of equal nodes, Pareto modes.

Symbols used throughout this package: classes k with b_k jobs; node types i with N_i nodes of G_i devices;
modes (g, r_kgi): the seconds r of a job of class k on g devices of a node of type i.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from saturn_airflow.model.cluster import Node
from saturn_airflow.model.problem import PlannedJob, Problem

#: Moments that :attr:`Instance.releases` has at most: the relaxation has rows for each.
_MOST_RELEASES = 24


class Mode(NamedTuple):
    """One way to run a job on a node of one type.

    :param devices: how many (g).
    :param seconds: how long (r).
    :param option: index of the strategy in the job's options.
    """

    devices: int
    seconds: float
    option: int

    @property
    def area(self) -> float:
        """Device-seconds it takes."""
        return self.devices * self.seconds


Modes = tuple[Mode, ...]


@dataclass(frozen=True)
class NodeType:
    """Nodes that no job can tell apart.

    :param devices: of each of them (G).
    :param nodes: their indices in the problem.
    :param free: (devices,) when each one's devices become free, in seconds from the plan's start, ascending.
    """

    kind: str
    devices: int
    nodes: tuple[int, ...]
    free: tuple[float, ...]

    def busy(self, until: float, since: float = 0.0) -> list[list[tuple[float, float]]]:
        """What the devices of one such node are busy with before they are free, from ``since`` to ``until``.

        :returns: the same time twice, each as jobs (share of the devices, seconds): one job for each device,
            and one for each span between two moments at which some become free, over all devices still busy
            in it. Bounds take whichever says more.
        """
        free = [max(0.0, min(until, at) - since) for at in self.free]
        devices = [(1 / self.devices, at) for at in free]
        between = [
            ((self.devices - number) / self.devices, at - before)
            for number, (before, at) in enumerate(pairwise([0.0, *free]))
        ]
        return [[job for job in jobs if job[1] > 0] for jobs in (devices, between)]


@dataclass(frozen=True)
class JobClass:
    """Jobs that no node can tell apart.

    :param jobs: their indices in the problem.
    :param modes: by node type, the Pareto modes, narrow and slow first; empty where the job may not run.
    :param release: seconds before which none of them may start.
    :param weight: what each counts for in the mean completion time.
    :param earliest_end: the first moment at which one of them may end, if nothing else runs.
    """

    jobs: tuple[int, ...]
    modes: tuple[Modes, ...]
    release: float
    weight: float
    earliest_end: float

    @cached_property
    def shortest(self) -> float:
        """Seconds of one of them under the fastest mode anywhere."""
        return min(mode.seconds for modes in self.modes for mode in modes)

    @cached_property
    def least_area(self) -> float:
        """Device-seconds of one of them under the mode that takes least, anywhere."""
        return min(mode.area for modes in self.modes for mode in modes)


@dataclass(frozen=True)
class Instance:
    """A problem, grouped."""

    problem: Problem
    types: tuple[NodeType, ...]
    classes: tuple[JobClass, ...]

    @cached_property
    def type_of(self) -> tuple[int, ...]:
        """Type of each node."""
        by_node = {node: i for i, kind in enumerate(self.types) for node in kind.nodes}
        return tuple(by_node[node] for node in range(len(self.problem.nodes)))

    @cached_property
    def class_of(self) -> tuple[int, ...]:
        """Class of each job."""
        by_job = {job: k for k, group in enumerate(self.classes) for job in group.jobs}
        return tuple(by_job[job] for job in range(len(self.problem.jobs)))

    @cached_property
    def modes(self) -> tuple[tuple[Modes, ...], ...]:
        """Modes of each job (not class) on each node type."""
        return tuple(self.classes[k].modes for k in self.class_of)

    @property
    def devices(self) -> int:
        """Devices of all nodes together."""
        return sum(node.devices for node in self.problem.nodes)

    @cached_property
    def has_releases(self) -> bool:
        """Whether any job may not start at 0."""
        return any(group.release > 0 for group in self.classes)

    @cached_property
    def releases(self) -> tuple[float, ...]:
        """Moments above 0 at which jobs are released, ascending; evenly chosen ones where there are many."""
        moments = sorted({group.release for group in self.classes} - {0.0})
        few = min(len(moments), _MOST_RELEASES)
        return tuple(moments[at * len(moments) // few] for at in range(few))


def group(problem: Problem) -> Instance:
    """The classes, types and modes of ``problem``."""
    # Nodes differ in type, too, where some job is bound to the one and not to the other.
    bindings = sorted({job.nodes for job in problem.jobs if job.nodes is not None})
    types: dict[tuple[object, ...], list[int]] = {}
    for index, node in enumerate(problem.nodes):
        free = tuple(sorted(problem.free_of(node)))
        key = (node.kind, node.devices, tuple(node.name in names for names in bindings), free)
        types.setdefault(key, []).append(index)
    node_types = tuple(
        NodeType(
            (first := problem.nodes[nodes[0]]).kind,
            first.devices,
            tuple(nodes),
            tuple(sorted(problem.free_of(first))),
        )
        for nodes in types.values()
    )
    classes: dict[tuple[object, ...], list[int]] = {}
    for index, job in enumerate(problem.jobs):
        options = tuple((o.technique, o.devices, tuple(sorted(o.seconds.items()))) for o in job.options)
        classes.setdefault((options, job.nodes, job.release, job.weight), []).append(index)
    job_classes = []
    for jobs in classes.values():
        job = problem.jobs[jobs[0]]
        modes = tuple(_pareto(job, problem.nodes[kind.nodes[0]]) for kind in node_types)
        ends = [
            max(job.release, kind.free[mode.devices - 1]) + mode.seconds
            for kind, own in zip(node_types, modes, strict=True)
            for mode in own
        ]
        job_classes.append(JobClass(tuple(jobs), modes, job.release, job.weight, min(ends)))
    return Instance(problem, node_types, tuple(job_classes))


def _pareto(job: PlannedJob, node: Node) -> Modes:
    """Modes of ``job`` on ``node`` of which none is both as narrow and as fast as another."""
    found = [
        Mode(option.devices, _seconds(option.seconds, node.kind), index)
        for index, option in enumerate(job.options)
        if Problem.fits(job, option, node)
    ]
    modes: list[Mode] = []
    # Narrow first; of one width, the fastest first, so that the others are dropped.
    for mode in sorted(found):
        if not modes or mode.seconds < modes[-1].seconds:
            modes.append(mode)
    return tuple(modes)


def _seconds(seconds: Mapping[str, float], kind: str) -> float:
    return float(seconds[kind])
