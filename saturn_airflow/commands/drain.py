"""``saturn drain``: keep new plans off nodes, such as before maintenance."""

from __future__ import annotations

import argparse


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = (
        "Keep new plans off nodes until `saturn undrain`. A sweep with another round to come ends its round "
        "now, and its jobs leave the node with a checkpoint; what the last plan of a sweep put there ends "
        "there. Without a name, list the nodes that are drained."
    )
    parser.add_argument("nodes", nargs="*", metavar="NODE", help="names of nodes")
    parser.add_argument("--reason", default="", help="what sweeps say of it")


def run(args: argparse.Namespace) -> int:
    """Drain, or list."""
    from saturn_airflow.model.errors import SaturnError
    from saturn_airflow.model.printable import one_line
    from saturn_airflow.operators import drains

    if not args.nodes:
        listed = drains.drained()
        for name, why in listed.items():
            print(f"{name}: {one_line(why)}")
        if not listed:
            print("No node is drained")
        return 0
    for name in check_names(args.nodes):
        try:
            drains.drain(name, args.reason)
        except OSError as error:
            raise SaturnError(f"{name} can't be drained: {error}; set [saturn] home") from None
        print(f"{name}: no new plan uses it; `saturn devices` there says what still runs")
    return 0


def check_names(names: list[str]) -> list[str]:
    """``names``; says of those that the deployment does not know that it does not.

    :raises InvalidSweepError: for what can't be the name of a node.
    """
    from saturn_airflow.model.cluster import Node
    from saturn_airflow.model.errors import InvalidSweepError
    from saturn_airflow.operators.inventory import deployed_cluster

    for name in names:
        Node(name, 1)
    try:
        known = [node.name for node in deployed_cluster()]
    except InvalidSweepError:  # only DAG files name nodes
        return names
    for name in names:
        if name not in known:
            print(f"{name}: no node of this deployment ({', '.join(known)}); a DAG file may name it")
    return names
