"""When jobs were at a node's devices, by their events; whether two held one at a time, or one was idle."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from soak_checks import events


@dataclass(frozen=True)
class Stay:
    """A job that was at a node's devices.

    :param planned: when its plan was made, in seconds since the epoch.
    :param asked: when it asked for the devices.
    :param began: when it got them.
    :param worked: when it last said something of its training.
    :param ended: when it said that it had left them.
    """

    node: str
    devices: tuple[str, ...]
    planned: float
    asked: float
    began: float
    worked: float
    ended: float


def stays_of(folder: Path, planned: float) -> Iterable[Stay]:
    """What a job's events say of the devices that it had.

    :param folder: the state of the job in its sweep.
    """
    run, node, asked, worked = "", "", 0.0, 0.0
    devices: tuple[str, ...] = ()
    began: float | None = None
    for event in events(folder):
        if event["run"] != run:
            if began is not None:  # its run was killed, and could not say that it ended
                yield Stay(node, devices, planned, asked, began, worked, worked)
            run, asked, began = event["run"], event["time"], None
            node = json.loads((folder / "runs" / run / "spec.json").read_text())["node"]
        if event["event"] == "leased":
            devices, began = tuple(event["names"]), event["time"]
        elif event["event"] in ("gave_way", "end"):
            if began is not None:
                yield Stay(node, devices, planned, asked, began, worked, event["time"])
            asked, began = event["time"], None
        worked = event["time"]
    if began is not None:  # so was the last one
        yield Stay(node, devices, planned, asked, began, worked, worked)


def shared(stays: list[Stay]) -> list[str]:
    """Which devices two jobs held at a time."""
    wrong = []
    for node, device in sorted({(stay.node, name) for stay in stays for name in stay.devices}):
        held = sorted((s.began, s.worked) for s in stays if s.node == node and device in s.devices)
        wrong += [
            f"{device} of {node} was given away {before[1] - after[0]:.3f} s too early"
            for before, after in pairwise(held)
            if after[0] < before[1]
        ]
    return wrong


def idle_share(
    stays: list[Stay], devices: Mapping[str, int], since: Callable[[Stay], float], anywhere: bool = False
) -> float:
    """Of all devices' time, the share in which they were idle while somebody could have used them.

    :param devices: how many each node has.
    :param since: when a job could have begun.
    :param anywhere: at the other node as well.
    """
    begin, end = min(stay.began for stay in stays), max(stay.ended for stay in stays)
    moments = sorted({moment for s in stays for moment in (since(s), s.began, s.ended)} | {begin, end})
    idle = 0.0
    for now, then in pairwise(moment for moment in moments if begin <= moment <= end):
        free = {
            node: count - sum(len(s.devices) for s in stays if s.node == node and s.began <= now < s.ended)
            for node, count in devices.items()
        }
        waiting = [s for s in stays if since(s) <= now < s.began]
        for stay in sorted(waiting, key=lambda stay: -len(stay.devices)):
            nodes = free if anywhere else [stay.node]
            node = max(nodes, key=lambda name: free[name])
            if len(stay.devices) <= free[node]:
                free[node] -= len(stay.devices)
                idle += (then - now) * len(stay.devices)
    return idle / ((end - begin) * sum(devices.values()))
