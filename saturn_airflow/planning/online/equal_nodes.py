"""Plans in which running jobs stay where they are among equal nodes: a move between equals gains nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from saturn_airflow.model.plan import Assignment, Place, Plan
from saturn_airflow.model.problem import Problem


class _Part(NamedTuple):
    """Devices of a node that share no job with its other devices, and the jobs they have."""

    devices: tuple[int, ...]
    jobs: tuple[str, ...]


def stay_among_equals(plan: Plan, problem: Problem, running: Mapping[str, Place]) -> Plan:
    """``plan`` with parts of equal nodes exchanged so that more running jobs go on where they run.

    Nothing starts or ends at another time. What the plan gives a job besides its node stays as it is.

    :param problem: what the plan is for.
    :param running: where jobs run.
    """
    while (better := next(_exchanged(plan, problem, running), None)) is not None:
        plan = better
    return plan


def _exchanged(plan: Plan, problem: Problem, running: Mapping[str, Place]) -> Iterator[Plan]:
    """Plans with one exchange that leaves more jobs where they run."""
    nodes = {node.name: node for node in problem.nodes}
    allowed = {job.name: job.nodes for job in problem.jobs}
    for a in plan.assignments:
        place = running.get(a.job)
        if place is None or place.node == a.node or not _goes_on(a, place) or place.node not in nodes:
            continue
        here, there = nodes[place.node], nodes[a.node]
        if (here.kind, here.devices) != (there.kind, there.devices):
            continue
        if any(problem.free_of(here)) or any(problem.free_of(there)):
            continue
        moved = next(part for part in _parts(plan, there.name, there.devices) if a.job in part.jobs)
        stays = _stays(plan.assignments, running)
        parts = _parts(plan, here.name, here.devices)
        # Rather parts without jobs that stay, large ones first.
        parts.sort(key=lambda part: (len(stays.intersection(part.jobs)), -len(part.devices), part.devices))
        other = _as_many(parts, len(moved.devices))
        if other is None or not all(
            _may_run(job, node, allowed)
            for jobs, node in ((moved.jobs, here.name), (other.jobs, there.name))
            for job in jobs
        ):
            continue
        new = _with_exchanged(plan, (there.name, moved), (here.name, other))
        if len(_stays(new.assignments, running)) > len(stays):
            yield new


def _goes_on(a: Assignment, place: Place) -> bool:
    """Whether a job that runs in ``place`` starts now under the same strategy, wherever that is."""
    return a.start == 0 and (a.technique, a.devices) == (place.technique, place.devices)


def _stays(assigned: Iterable[Assignment], running: Mapping[str, Place]) -> set[str]:
    """Running jobs that go on where they run, perhaps on other devices of their node."""
    return {
        a.job
        for a in assigned
        if (place := running.get(a.job)) is not None and place.node == a.node and _goes_on(a, place)
    }


def _may_run(job: str, node: str, allowed: Mapping[str, tuple[str, ...] | None]) -> bool:
    nodes = allowed.get(job)
    return nodes is None or node in nodes


def _parts(plan: Plan, node: str, devices: int) -> list[_Part]:
    """The node's devices in parts: the connected components, where devices that share a job are connected."""
    part_of = {device: {device} for device in range(devices)}
    jobs: dict[int, list[str]] = {device: [] for device in range(devices)}
    for a in plan.assignments:
        if a.node == node:
            joined = set().union(*(part_of[device] for device in a.device_ids))
            part_of.update(dict.fromkeys(joined, joined))
            jobs[a.device_ids[0]].append(a.job)
    parts = {tuple(sorted(part)) for part in part_of.values()}
    return [_Part(part, tuple(job for device in part for job in jobs[device])) for part in sorted(parts)]


def _as_many(parts: Iterable[_Part], devices: int) -> _Part | None:
    """Whole parts that are so many devices together, taken greedily in this order; None where that fails."""
    ids: list[int] = []
    jobs: list[str] = []
    for part in parts:
        if len(ids) + len(part.devices) <= devices:
            ids += part.devices
            jobs += part.jobs
    return _Part(tuple(sorted(ids)), tuple(jobs)) if len(ids) == devices else None


def _with_exchanged(plan: Plan, one: tuple[str, _Part], two: tuple[str, _Part]) -> Plan:
    """``plan`` with the devices of two parts, each with its node, exchanged one by one."""
    to: dict[tuple[str, int], tuple[str, int]] = {}
    for first, second in zip(one[1].devices, two[1].devices, strict=True):
        to[one[0], first], to[two[0], second] = (two[0], second), (one[0], first)
    assigned = []
    for a in plan.assignments:
        places = [to.get((a.node, device), (a.node, device)) for device in a.device_ids]
        ids = tuple(sorted(device for _, device in places))
        assigned.append(dataclasses.replace(a, node=places[0][0], device_ids=ids))
    return dataclasses.replace(plan, assignments=tuple(assigned))
