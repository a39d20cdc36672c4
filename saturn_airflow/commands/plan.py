"""``saturn plan FILE``: plan the jobs of a problem file, and say what the plan is worth."""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import TYPE_CHECKING

from saturn_airflow.commands import command_line
from saturn_airflow.model.problem import Problem

if TYPE_CHECKING:
    from saturn_airflow.model.plan import Plan

#: Seconds from the user's return key to this line: Python and the imports above.
_STARTING = 0.1
_STARTED = time.monotonic() - _STARTING
#: More than these, on machines with fewer cores, would only hinder each other.
_MOST_PROCESSES = 64


def add(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("file", help="a planning problem (JSON)")
    parser.add_argument(
        "--time-limit", type=float, default=10.0, metavar="S", help="seconds to plan for (10)"
    )
    parser.add_argument(
        "--gap", type=float, default=0.0, metavar="SHARE", help="stop this close to optimal (0)"
    )
    parser.add_argument(
        "--objective",
        choices=("makespan", "mean-completion", "device-time"),
        default="makespan",
        help="what to minimise; device-time needs a deadline",
    )
    parser.add_argument(
        "--deadline", type=float, metavar="S", help="seconds by which all jobs must have ended"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the search (0)")
    parser.add_argument(
        "--processes", type=int, metavar="N", help="processes to search with (one per core, up to 4)"
    )
    parser.add_argument(
        "--previous", metavar="PLAN", help="a plan (JSON) to carry on where nothing is better"
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument(
        "--compare", action="store_true", help="compare with what people do without a planner"
    )


def run(args: argparse.Namespace) -> int:
    """Plan and print."""
    from saturn_airflow.planning import solve
    from saturn_airflow.planning.presenting.plan_files import read_plan

    command_line.check_number("--processes", args.processes, 1, max(_MOST_PROCESSES, _cores()))
    started = _STARTED if time.monotonic() - _STARTED < 1 else None
    problem = Problem.read(args.file)
    previous = read_plan(args.previous) if args.previous else None
    processes = args.processes if args.processes is not None else min(4, _cores())

    def planned(on_progress: object = None) -> Plan:
        return solve(
            problem,
            objective=args.objective,
            time_limit=args.time_limit,
            gap=args.gap,
            seed=args.seed,
            processes=processes,
            previous=previous,
            deadline=args.deadline,
            started=started,
            on_progress=on_progress,  # type: ignore[arg-type]
        )

    if args.json and not args.compare:
        print(json.dumps(planned().to_dict()))
        return 0
    from saturn_airflow.planning.presenting import terminal

    with terminal.progress() as on_progress:
        plan = planned(on_progress)
    if args.compare:
        terminal.comparison(problem, plan, args.time_limit, as_json=args.json)
    else:
        terminal.plan(problem, plan)
    return 0


def _cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
