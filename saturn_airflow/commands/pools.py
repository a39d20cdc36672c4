"""``saturn pools``: give each node the pool in which its tasks wait."""

from __future__ import annotations

import argparse
import contextlib

from saturn_airflow.commands import command_line


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = (
        "Give each node of this deployment an Airflow pool with as many slots as its worker runs tasks at "
        "once, and the tasks of sweeps that need no device one of their own, so that tasks of several sweeps "
        "wait there and are not lost in a worker's queue. Run it on the scheduler's machine, once the "
        "workers run, and again when a --concurrency changes."
    )
    parser.add_argument(
        "nodes",
        nargs="*",
        metavar="NODE",
        help="nodes that only DAG files name, such as gpu-c:8:a100 (default: those of the deployment)",
    )
    parser.add_argument(
        "--slots",
        type=int,
        metavar="N",
        help="slots for a node whose worker does not answer (default: its devices and two)",
    )
    parser.add_argument(
        "--short-slots",
        type=int,
        metavar="N",
        help="slots for tasks that need no device where their worker does not answer (default: 4)",
    )


def run(args: argparse.Namespace) -> int:
    """Make the pools."""
    from saturn_airflow.deployment import pools
    from saturn_airflow.model.cluster import Node
    from saturn_airflow.operators.inventory import (
        SHORT_POOL,
        default_queue,
        deployed_cluster,
        has_queues,
        worker_slots,
    )

    command_line.check_number("--slots", args.slots, 1)
    command_line.check_number("--short-slots", args.short_slots, 1)
    if not has_queues():
        print("This executor has no queues in which tasks could be lost: no pools are needed")
        return 0
    slots: dict[str, int] = {}
    with contextlib.suppress(Exception):  # before the broker or any worker is there, sizes are the usual
        slots = worker_slots()
    nodes = [Node.parse(text) for text in args.nodes] or deployed_cluster()
    queues = {SHORT_POOL: default_queue()}
    for name, size in pools.make(nodes, slots, args.slots, args.short_slots).items():
        said = "as its worker" if queues.get(name, name) in slots else "its worker did not answer"
        print(f"{name}: {size} slots ({said})")
    return 0
