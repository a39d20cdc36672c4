"""``saturn undrain``: let plans use drained nodes again."""

from __future__ import annotations

import argparse


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("nodes", nargs="+", metavar="NODE", help="names of nodes")


def run(args: argparse.Namespace) -> int:
    """Undo drains."""
    from saturn_airflow.commands.drain import check_names
    from saturn_airflow.operators import drains

    for name in check_names(args.nodes):
        print(f"{name}: plans use it again" if drains.undrain(name) else f"{name}: was not drained")
    return 0
