"""When jobs were at a node's devices, from what their events say, and whether two ever held one at a time."""

from __future__ import annotations

import json
from collections.abc import Iterable
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
