"""``saturn demo``: an example DAG on this machine, start to end."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from saturn_airflow.commands.command_line import COMPOSE, add_dags

#: For each DAG of the demo's own, the modules that it and its services need, and the extra that brings each.
_NEEDED = {"nightly_retrain": {"torch": "torch", "transformers": "transformers"}}
_NEEDED["nightly_on_cluster"] = {"celery": "cluster", **_NEEDED["nightly_retrain"]}


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = (
        "Start MLflow and Airflow on this machine (127.0.0.1 only), run the DAG nightly_retrain or another, "
        "show its progress, and stop everything. Exit status: 0 when every job finished, 1 when one failed, "
        "2 when the demo could not run."
    )
    parser.add_argument(
        "--state", type=Path, default=Path(".saturn"), help="folder for all it writes (%(default)s)"
    )
    add_dags(parser)
    parser.add_argument(
        "--dag", metavar="ID", help="run this DAG, in the file ID.py, whose sweep has task_id='sweep'"
    )
    parser.add_argument("--keep", action="store_true", help="leave both UIs up until Ctrl-C")
    parser.add_argument(
        "--cluster",
        action="store_true",
        help="run the DAG nightly_on_cluster on the services of docker/compose.yaml (Celery, Redis, "
        "Postgres), with two nodes of two CPU devices",
    )


def run(args: argparse.Namespace) -> int:
    """Run the demo; its exit status is 1 where a job failed."""
    from saturn_airflow.demo.demo_services import NO_SCHEDULE, Services
    from saturn_airflow.demo.run import run_demo
    from saturn_airflow.deployment.local import LocalCluster
    from saturn_airflow.model.errors import SaturnError

    dag_id = args.dag or ("nightly_on_cluster" if args.cluster else "nightly_retrain")
    if not (args.dags / f"{dag_id}.py").is_file():
        raise SaturnError(f"{args.dags} has no {dag_id}.py; say with --dags where it is")
    if missing := [name for name in _NEEDED.get(dag_id, {}) if importlib.util.find_spec(name) is None]:
        extras = ",".join(dict.fromkeys(_NEEDED[dag_id].values()))
        raise SaturnError(
            f"{dag_id} needs {' and '.join(missing)}, not installed here: pip install "
            f"'saturn-airflow[{extras}]'"
        )
    services = (
        LocalCluster(args.state, COMPOSE, args.dags, environment=NO_SCHEDULE)
        if args.cluster
        else Services(args.state, args.dags)
    )
    return run_demo(services, dag_id, args.keep)
