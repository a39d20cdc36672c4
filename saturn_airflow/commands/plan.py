"""``saturn plan FILE``: plan the jobs of a problem file."""

from __future__ import annotations

import argparse
import json

from saturn_airflow.problem import Problem


def add(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("file", help="a planning problem (JSON)")
    parser.add_argument("--time-limit", type=float, default=10.0, metavar="S", help="seconds to plan for")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")


def run(args: argparse.Namespace) -> int:
    """Plan and print."""
    from saturn_airflow.planning import solve

    plan = solve(Problem.read(args.file), time_limit=args.time_limit)
    print(json.dumps(plan.to_dict()))
    return 0
