"""``saturn demo``: the nightly DAG on this machine, start to end."""

from __future__ import annotations

import argparse
from pathlib import Path


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = (
        "Start MLflow and Airflow on this machine (127.0.0.1 only), run the DAG nightly_retrain, show its "
        "progress, and stop everything. Exit status: 0 when every job finished, 1 when one failed, 2 when "
        "the demo could not run."
    )
    parser.add_argument(
        "--state", type=Path, default=Path(".saturn"), help="folder for all it writes (%(default)s)"
    )
    parser.add_argument(
        "--dags",
        type=Path,
        default=Path(__file__).parents[2] / "dags",
        help="folder of the example DAGs (that of the clone)",
    )
    parser.add_argument("--keep", action="store_true", help="leave both UIs up until Ctrl-C")


def run(args: argparse.Namespace) -> int:
    """Run the demo."""
    from saturn_airflow.demo.run import run_demo

    return run_demo(args.state, args.dags, args.keep)
