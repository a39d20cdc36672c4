"""``saturn devices``: who holds and who waits for the devices of this machine, and who else is on them."""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from saturn_airflow.model.errors import InvalidSweepError, SaturnError
from saturn_airflow.model.printable import one_line


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = (
        "Show the devices of this machine: who holds each since when, who waits, and which processes on a "
        "GPU are not Saturn's. With --announce, make this machine known to sweeps that name no cluster."
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.add_argument(
        "--leases", type=Path, metavar="FOLDER", help="folder of the device locks ([saturn] leases_folder)"
    )
    parser.add_argument("--announce", metavar="NAME", help="announce this machine as the node NAME")
    parser.add_argument("--cpu", type=int, metavar="N", help="announce N CPU slots instead of the GPUs")
    parser.add_argument("--kind", help="announce this kind of device (the GPU's name)")
    parser.add_argument("--queue", default="", help="announce this queue (saturn.NAME)")


def run(args: argparse.Namespace) -> int:
    """Show, or announce."""
    if args.announce:
        return _announce(args)
    for option, value in (("--cpu", args.cpu), ("--kind", args.kind), ("--queue", args.queue)):
        if value not in (None, ""):
            raise SaturnError(
                f"{option} {value} says what is announced, and nothing is: add --announce NAME, the name "
                "that this machine is to have as a node, or leave it out to see its devices"
            )
    if args.leases and not args.leases.is_dir():
        raise SaturnError(f"there is no folder {args.leases} of device locks")
    from saturn_airflow.deployment.device_use import device_use

    shown = device_use(args.leases or _configured_folder())
    print(json.dumps(shown, indent=2) if args.json else in_words(shown, time.time()))
    return 0


def in_words(shown: Mapping[str, Any], now: float) -> str:
    """What :func:`~saturn_airflow.deployment.device_use.device_use` found as a table for people.

    :param now: seconds since the epoch.
    """
    rows = [["device", "kind", "holder", "for"]]
    for device in shown["devices"]:
        name = device["name"] if device["id"] is None else f"{device['id']}: {device['name']}"
        holder = device["holder"] or {"who": "-", "pid": 0, "since": now}
        since = _age(now - holder["since"]) if device["holder"] else "-"
        who = f"{holder['who']} (process {holder['pid']})" if device["holder"] else "-"
        rows.append([name, device["kind"], who, since])
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
    if len(rows) == 1:
        lines = [f"No device of this machine was ever held, and there is no GPU (locks: {shown['folder']})"]
    lines += [
        f"waiting for {_age(now - waiter['since'])}: {waiter['who']} (process {waiter['pid']})"
        for waiter in shown["waiters"]
    ]
    lines += [f"ignored in {shown['folder']}: {what}" for what in shown["ignored"]]
    for device in shown["devices"]:
        if device["strangers"]:
            found = ", ".join(_named(pid) for pid in device["strangers"])
            lines.append(f"not Saturn's on {device['name']}: process {found}")
    return "\n".join(one_line(line).rstrip() for line in lines)


def _announce(args: argparse.Namespace) -> int:
    """Write this machine down as a node; of GPUs, as many as are visible, and their kind."""
    from saturn_airflow.launch import devices
    from saturn_airflow.model.cluster import Node
    from saturn_airflow.operators.inventory import announce

    if args.cpu is not None:
        count, kind = args.cpu, "cpu"
    else:
        visible, kinds = devices.gpu_uuids(), devices.gpus()
        mine = {kinds[uuid] for uuid in visible if uuid in kinds}
        if not visible:
            raise InvalidSweepError("no GPU is visible here; announce CPU slots with --cpu N")
        if len(mine) > 1 and not args.kind:
            raise InvalidSweepError(
                f"this machine has GPUs of several kinds ({', '.join(sorted(mine))}), and a node has one; "
                "give each its own worker with CUDA_VISIBLE_DEVICES, and announce each"
            )
        count, kind = len(visible), re.sub(r"[^a-z0-9]+", "-", next(iter(mine), "gpu").lower()).strip("-")
    node = Node(args.announce, count, args.kind or kind, args.queue)
    try:
        path = announce(node)
    except OSError as error:
        raise SaturnError(f"the node can't be announced: {error}; set [saturn] home") from None
    print(f"{node.name}: {node.devices} x {node.kind}, queue {node.queue} ({path})")
    return 0


def _configured_folder() -> Path | None:
    """``[saturn] leases_folder``; None (the default folder) where Airflow is not installed."""
    try:
        from saturn_airflow.operators.context import leases_folder
    except ModuleNotFoundError:  # a machine with torch alone
        return None
    return Path(leases_folder())


def _named(pid: int) -> str:
    """A process's id with its program's name."""
    try:
        return f"{pid} ({Path(f'/proc/{pid}/comm').read_text().strip()})"
    except OSError:
        return f"{pid} (of another container)"


def _age(seconds: float) -> str:
    minutes = int(seconds // 60)
    if minutes < 1:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
