"""``saturn simulate --arrivals FILE``: sweeps that arrive at one cluster, on paper."""

from __future__ import annotations

import argparse
import dataclasses
import json
import zlib
from typing import TYPE_CHECKING, Any

from saturn_airflow.commands import command_line
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.problem import Problem
from saturn_airflow.model.sharing import SharingRules, least_seconds

if TYPE_CHECKING:
    from saturn_airflow.model.sharing import SharedJob, SharedSweep
    from saturn_airflow.sharing.arrivals_file import ArrivalsFile
    from saturn_airflow.sharing.replay import Arrival, Replay


def run(args: argparse.Namespace) -> int:
    """Simulate and print."""
    from saturn_airflow.sharing.arrivals_file import ArrivalsFile
    from saturn_airflow.sharing.replay import replay

    if args.fail_node or args.selection:
        raise InvalidSweepError(
            "--fail-node and --selection do not go with --arrivals; nodes that go are named in the file"
        )
    file = ArrivalsFile.read(args.arrivals)
    rules = SharingRules(checkpoint=args.checkpoint, shares=file.shares)
    arrivals = [_arrival(sweep, file, args) for sweep in file.sweeps]
    found = replay(arrivals, file.nodes, rules, changes=file.changes)
    sweeps = [arrival.sweep for arrival in arrivals]
    if args.json:
        print(json.dumps(_as_dict(file, sweeps, found)))
    else:
        _show(file, sweeps, found)
    return 0


def _arrival(sweep: SharedSweep, file: ArrivalsFile, args: argparse.Namespace) -> Arrival:
    """``sweep`` with launches, and what its jobs really take."""
    from saturn_airflow.planning.online.actual_seconds import truth, with_launches
    from saturn_airflow.sharing.replay import Arrival

    problem = Problem(sweep.name, file.nodes, tuple(job.job for job in sweep.jobs))
    expected = with_launches(problem, args.launch)
    seed = args.seed * 2**32 + zlib.crc32(sweep.name.encode())
    actual = truth(expected, args.noise, seed, args.shape)
    jobs: tuple[SharedJob, ...] = tuple(
        dataclasses.replace(job, job=own) for job, own in zip(sweep.jobs, expected.jobs, strict=True)
    )
    changed = dataclasses.replace(sweep, jobs=jobs, alone=least_seconds(expected.jobs, file.nodes))
    return Arrival(changed, actual.jobs)


def _rows(sweeps: list[SharedSweep], found: Replay) -> list[dict[str, Any]]:
    """What became of each sweep; times are seconds since the replay's beginning.

    ``completion`` is the seconds from its arrival to its end, ``stretch`` that by what it takes at least
    alone.
    """
    begun: dict[str, float] = {}
    for ran in found.ran:
        begun[ran.sweep] = min(ran.start, begun.get(ran.sweep, ran.start))
    rows = []
    for sweep in sweeps:
        done = found.done.get(sweep.name)
        took = None if done is None else done - sweep.arrived
        rows.append(
            {
                "sweep": sweep.name,
                "team": sweep.team,
                "priority": sweep.priority,
                "arrived": sweep.arrived,
                "begun": begun.get(sweep.name),
                "done": done,
                "completion": took,
                "stretch": None if took is None else took / sweep.alone,
                "in_time": None if sweep.deadline is None else done is not None and done <= sweep.deadline,
            }
        )
    return rows


def _as_dict(file: ArrivalsFile, sweeps: list[SharedSweep], found: Replay) -> dict[str, Any]:
    """The replay as JSON-ready data; times are seconds since its beginning."""
    rows = _rows(sweeps, found)
    done = [row["completion"] for row in rows if row["completion"] is not None]
    ran = [{**dataclasses.asdict(r), "place": dataclasses.asdict(r.place)} for r in found.ran]
    return {
        "name": file.name,
        "mean_completion": sum(done) / len(done) if done else None,
        "stops": found.stops,
        "not_done": [row["sweep"] for row in rows if row["done"] is None],
        "sweeps": rows,
        "ran": ran,
    }


def _show(file: ArrivalsFile, sweeps: list[SharedSweep], found: Replay) -> None:
    from rich.table import Table

    from saturn_airflow.planning.presenting.terminal import duration

    console = command_line.console()
    table = Table(title=f"Sweeps of {file.name}", title_justify="left")
    table.add_column("sweep")
    table.add_column("team")
    for name in ("arrived", "waited", "took", "of alone", "deadline"):
        table.add_column(name, justify="right")

    def told(seconds: float | None) -> str:
        return "-" if seconds is None else duration(seconds)

    rows = _rows(sweeps, found)
    for row in rows:
        table.add_row(
            row["sweep"],
            row["team"],
            told(row["arrived"]),
            told(None if row["begun"] is None else row["begun"] - row["arrived"]),
            told(row["completion"]) if row["done"] is not None else "not done",
            "-" if row["stretch"] is None else f"{row['stretch']:.1f} x",
            {None: "", True: "met", False: "missed"}[row["in_time"]],
        )
    console.print(table)
    done = [row["completion"] for row in rows if row["completion"] is not None]
    if done:
        console.print(
            f"{len(done)} of {len(rows)} sweeps done after {duration(sum(done) / len(done))} on average; "
            f"running jobs were stopped or moved {found.stops} times"
        )
    if left := [row["sweep"] for row in rows if row["done"] is None]:
        console.print(f"not done, since no node was left that fits: {', '.join(left)}")
