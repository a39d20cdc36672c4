"""``saturn simulate FILE``: run a sweep, or sweeps that arrive, on paper, before paying for them."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from saturn_airflow.commands import command_line
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.problem import Problem
from saturn_airflow.model.rounds import Rounds
from saturn_airflow.model.selection import MedianStopping, Rule, SuccessiveHalving

if TYPE_CHECKING:
    from saturn_airflow.planning.online.simulation import NodeLoss, Simulation

#: Estimates that are off by more than that are none: the numbers would not fit into floats.
_MOST_NOISE = 10.0


def add(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("file", nargs="?", help="a planning problem (JSON)")
    what.add_argument(
        "--arrivals",
        metavar="FILE",
        help="sweeps that arrive over days at one cluster (JSON, docs/sharing.md); of the other options only "
        "--noise, --shape, --seed, --checkpoint, --launch and --json count",
    )
    parser.add_argument("--rounds", type=int, default=4, metavar="K", help="rounds at the most (4)")
    when = parser.add_mutually_exclusive_group()
    when.add_argument("--every", type=float, metavar="MIN", help="a round ends after so many minutes")
    when.add_argument("--share", type=float, help="a round ends after this share of its plan (0.4)")
    when.add_argument("--off-by", type=float, metavar="SHARE", help="a round ends when a job strays so far")
    parser.add_argument(
        "--noise", type=float, default=0.2, metavar="SHARE", help="how far estimates are off (0.2)"
    )
    parser.add_argument(
        "--shape",
        choices=("job", "make", "strategy", "mixed"),
        default="mixed",
        help="what errors have in common: all strategies of a job, all jobs alike, nothing, some of each",
    )
    parser.add_argument("--seed", type=int, default=0, help="of errors, curves and searches (0)")
    parser.add_argument(
        "--fail-node",
        action="append",
        default=[],
        metavar="NAME@SHARE",
        help="lose this node after this share of the planned makespan; may be given again",
    )
    parser.add_argument("--selection", choices=("halving", "median"), help="drop jobs between rounds")
    parser.add_argument(
        "--epochs", type=int, default=8, help="of each job, for the learning curves that are made up (8)"
    )
    parser.add_argument(
        "--checkpoint", type=float, default=20.0, metavar="S", help="seconds to save a job that moves (20)"
    )
    parser.add_argument(
        "--launch", type=float, default=40.0, metavar="S", help="seconds to launch and load a job (40)"
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        default=1.0,
        metavar="S",
        help="of each search, in thousands of its steps: about seconds (1)",
    )
    parser.add_argument("--json", action="store_true", help="print the simulation as JSON")


def run(args: argparse.Namespace) -> int:
    """Simulate and print."""
    command_line.check_number("--noise", args.noise, 0, _MOST_NOISE)
    command_line.check_number("--checkpoint", args.checkpoint, 0)
    command_line.check_number("--launch", args.launch, 0)
    command_line.check_number("--epochs", args.epochs, 1)
    command_line.check_number("--time-limit", args.time_limit, 0.001)
    if args.arrivals is not None:
        from saturn_airflow.commands import simulate_arrivals

        return simulate_arrivals.run(args)
    from saturn_airflow.planning.online import simulation

    problem = Problem.read(args.file)
    if problem.free or any(job.release for job in problem.jobs):
        raise InvalidSweepError(
            f"{args.file}: devices that are free later, and jobs with a release, can't be simulated; leave "
            "'free' and 'release' out"
        )
    rounds = Rounds(most=args.rounds, every_minutes=args.every, share=args.share, off_by=args.off_by)
    costs = simulation.Costs(checkpoint=args.checkpoint, launch=args.launch)
    same: dict[str, Any] = {
        "noise": args.noise,
        "seed": args.seed,
        "shape": args.shape,
        "costs": costs,
        "time_limit": args.time_limit,
        "epochs": args.epochs,
        "failures": [_failure(text) for text in args.fail_node],
    }
    found = simulation.simulate(problem, rounds=rounds, selection=_rule(args.selection), **same)
    once = simulation.simulate(problem, rounds=Rounds(most=1), **same)
    known = simulation.clairvoyant(
        problem,
        noise=args.noise,
        seed=args.seed,
        shape=args.shape,
        costs=costs,
        time_limit=args.time_limit,
    )
    if args.json:
        others = {"one_shot": once.makespan, "clairvoyant": known}
        print(json.dumps({"name": problem.name, "seed": args.seed, **others, **found.to_dict()}))
    else:
        _show(problem, found, once, known)
    return 0


def _failure(text: str) -> NodeLoss:
    """What ``NAME@SHARE`` says."""
    from saturn_airflow.planning.online.simulation import NodeLoss

    name, at, share = text.rpartition("@")
    try:
        if not at:
            raise ValueError
        return NodeLoss(name, float(share))
    except ValueError:
        raise InvalidSweepError(
            f"--fail-node {text!r}: write NAME@SHARE, such as gpu-a@0.5 for half of the planned makespan"
        ) from None


def _rule(name: str | None) -> Rule | None:
    return {None: None, "halving": SuccessiveHalving(), "median": MedianStopping()}[name]


def _show(problem: Problem, found: Simulation, once: Simulation, known: float) -> None:
    """Print the rounds as a table, and what they are to be compared with.

    :param once: the simulation with one plan and without selection.
    :param known: the makespan, in seconds, of a plan made with the actual seconds.
    """
    from rich.table import Table

    from saturn_airflow.planning.presenting.terminal import duration

    console = command_line.console()
    table = Table(title=f"Rounds of {problem.name}", title_justify="left")
    table.add_column("round", justify="right")
    table.add_column("begins", justify="right")
    table.add_column("because")
    table.add_column("plan")
    for name in ("moved", "dropped", "to end at"):
        table.add_column(name, justify="right")
    for number, entry in enumerate(found.rounds, 1):
        table.add_row(
            str(number),
            duration(entry.start),
            entry.why,
            "new" if entry.adopted else "as before",
            str(len(entry.moved)),
            str(len(entry.pruned)),
            duration(entry.expected),
        )
    console.print(table)
    for text in found.warnings:
        console.print(f"warning: {text}")
    console.print(
        f"ends after {duration(found.makespan)} with {found.moves} moves, "
        f"{len(found.pruned)} of {len(problem.jobs)} jobs dropped"
    )
    console.print(
        f"planned once, without selection: {duration(once.makespan)}; "
        f"planned once by one who knows all seconds, and loses no node: {duration(known)}"
    )
