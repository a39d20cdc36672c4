"""Devices that nobody needs widen whoever gains most by them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from saturn_airflow.model.problem import Way
from saturn_airflow.model.sharing import SharedCluster, SharingRules
from saturn_airflow.sharing.device_state import Devices, JobEntry
from saturn_airflow.sharing.ranking import ways_on

#: Seconds of a job count by this power of its share of the time to its sweep's end, and for this much at
#: least: who ends early anyway need not be wider.
_LAST = 4
_NOT_LAST = 0.1


class _Gain(NamedTuple):
    """What a job wins by more devices, and where.

    :param score: seconds per device, weighted.
    """

    score: float
    node: str
    way: Way


def widen(
    cluster: SharedCluster, rules: SharingRules, devices: Devices, sweeps: Sequence[Sequence[JobEntry]]
) -> None:
    """Give the idle devices to those who gain most, one after another.

    A job that has not started may go to another node for it. One that runs must be stopped, so only where its
    sweep may be, and where it wins several times what that costs.
    """
    idle = {node.name: len(devices.idle(node.name)) for node in cluster.nodes}
    placed = [entry for entries in sweeps for entry in entries if entry.target is not None]
    ends = {entries[0].sweep.name: _end(entries) for entries in sweeps if entries}
    by_name = {entries[0].sweep.name: entries for entries in sweeps if entries}
    while any(idle.values()):
        gains = [
            (gain, entry)
            for entry in placed
            if (gain := _gain(cluster, rules, entry, idle, ends[entry.sweep.name])) is not None
        ]
        if not gains:
            return
        gain, entry = max(gains, key=lambda found: (found[0].score, found[1].key))
        if entry.stays:
            devices.stop(entry, cluster.now + rules.seconds_to_leave(entry.job))
        else:
            devices.give_back(entry)
        devices.claim(entry, gain.node, gain.way)
        idle = {node.name: len(devices.idle(node.name)) for node in cluster.nodes}
        ends[entry.sweep.name] = _end(by_name[entry.sweep.name])


def _end(entries: Sequence[JobEntry]) -> float:
    """Seconds until the last job of a sweep ends that is to run now."""
    return max((entry.seconds() for entry in entries if entry.target is not None), default=0.0)


def _gain(
    cluster: SharedCluster, rules: SharingRules, entry: JobEntry, idle: dict[str, int], end: float
) -> _Gain | None:
    """The best that ``entry`` can win by more devices; None where it wins nothing, or not enough for a stop.

    :param idle: devices, by node.
    :param end: seconds until its sweep's last job ends.
    """
    assert entry.target is not None
    if entry.stays and not entry.may_stop(cluster.now, rules):
        return None
    left, has, present = entry.job.left, entry.target.devices, entry.seconds()
    # Sweeps with the least work left weigh most, and in a sweep the jobs that end last.
    weight = max(_NOT_LAST, (present / end) ** _LAST if end else 1.0) / max(entry.rank.work, 1.0)
    leaving = rules.seconds_to_leave(entry.job) if entry.stays else 0.0
    best: _Gain | None = None
    for node in cluster.nodes:
        free = idle[node.name] + (has if node.name == entry.target.node else 0)
        for way in ways_on(entry.job.job, node):
            if not has < way.devices <= free:
                continue
            cost = leaving + way.setup if entry.stays else 0.0
            won = present - way.seconds(left) - leaving
            if won <= rules.win * cost:
                continue
            score = won * weight / (way.devices - has)
            if best is None or score > best.score:
                best = _Gain(score, node.name, way)
    return best
