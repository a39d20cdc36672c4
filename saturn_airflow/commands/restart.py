"""``saturn restart``: what is to become of jobs of a DAG run when they are trained the next time."""

from __future__ import annotations

import argparse
from pathlib import Path

from saturn_airflow.commands import command_line
from saturn_airflow.model.errors import SaturnError
from saturn_airflow.model.folders import slug


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("dag", metavar="DAG", help="the DAG's id")
    parser.add_argument("run", metavar="RUN", help="the DAG run's id")
    parser.add_argument("jobs", metavar="JOB", nargs="*", help="names of jobs (default: all that have begun)")
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument(
        "--from-scratch", action="store_true", help="train from the beginning; what was trained is set aside"
    )
    how.add_argument(
        "--go-on",
        action="store_true",
        help="go on from the last checkpoint, in spite of a change",
    )
    how.add_argument(
        "--as-planned",
        action="store_true",
        help="train a job that is cleared alone by its plan, whatever the DAG's file says of it by now",
    )
    parser.add_argument("--home", type=Path, help="Saturn's folder ([saturn] home; default: as configured)")


def run(args: argparse.Namespace) -> int:
    """Leave the wish in the jobs' folders, where their train tasks read it."""
    from saturn_airflow.launch import restarting

    home = args.home or command_line.home()
    sweeps = home / "sweeps" / slug(args.dag) / slug(args.run)
    if not sweeps.is_dir():
        raise SaturnError(
            f"there is nothing of the run {args.run!r} of {args.dag!r} in {home / 'sweeps'}; give the ids as "
            "Airflow shows them, and --home where [saturn] home is another folder"
        )
    begun = _begun(sweeps)
    if unknown := [job for job in args.jobs if job not in begun]:
        raise SaturnError(
            f"no job {unknown[0]!r} of that run has begun; those that have are "
            + (", ".join(sorted(begun)) or "none")
        )
    names = sorted(args.jobs or begun)
    wish, what = restarting.GO_ON, "goes on from its last checkpoint"
    if args.from_scratch:
        wish, what = restarting.FROM_SCRATCH, "starts from scratch"
    elif args.as_planned:
        wish, what = restarting.AS_PLANNED, "is trained as planned"
    for name in names:
        for folder in begun[name]:
            restarting.ask_for(folder, wish)
    for name in names:
        print(f"{name}: {what} when its task runs the next time")
    print("Now clear these tasks in Airflow, where they are not about to be tried again.")
    return 0


def _begun(sweeps: Path) -> dict[str, list[Path]]:
    """The folders of the jobs of a DAG run that have run, by name; two sweeps may have a job of one name."""
    from saturn_airflow.launch import runs

    found: dict[str, list[Path]] = {}
    for folder in sorted({path.parent for path in sweeps.glob("*/*/runs")}):
        if of_job := runs.all_of(folder):
            found.setdefault(of_job[-1].spec.job.name, []).append(folder)
    return found
