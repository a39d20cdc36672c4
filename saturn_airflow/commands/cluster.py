"""``saturn cluster``: a whole deployment on this machine."""

from __future__ import annotations

import argparse
from contextlib import suppress
from pathlib import Path

from saturn_airflow.commands.command_line import COMPOSE, add_dags


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = (
        "Start the services of docker/compose.yaml as processes of this machine (127.0.0.1 only): Postgres, "
        "Redis, MLflow, Airflow, a worker, and a worker per node. They run until Ctrl-C; one that ends by "
        "itself is started again, as the compose file's restart policy says. Exit status: 0 after Ctrl-C, 2 "
        "when a service does not start, or ends again and again."
    )
    parser.add_argument(
        "--state",
        type=Path,
        default=Path(".saturn-cluster"),
        help="folder for all they write; one used before is taken up again (%(default)s)",
    )
    parser.add_argument("--compose", type=Path, default=COMPOSE, help="the compose file (Saturn's own)")
    add_dags(parser)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a variable of the compose file, such as NODE_CONCURRENCY=12",
    )
    parser.add_argument(
        "--new-secrets",
        nargs="?",
        const="",
        metavar="FILE",
        help="write fresh secrets into FILE, such as docker/.env, where it lacks some, for its owner alone "
        "to read (without FILE: print them), and do nothing else",
    )


def run(args: argparse.Namespace) -> int:
    """Start the cluster and keep it up until Ctrl-C."""
    import time

    from rich.console import Console

    from saturn_airflow.deployment.local import LocalCluster, new_secrets, secrets_of
    from saturn_airflow.deployment.processes import end_on_signals
    from saturn_airflow.model.errors import SaturnError

    if args.new_secrets:
        try:
            secrets_of(Path(args.new_secrets))
        except OSError as error:
            raise SaturnError(f"--new-secrets {args.new_secrets}: {error.strerror}") from None
        return 0
    if args.new_secrets is not None:
        print("".join(f"{name}={value}\n" for name, value in new_secrets().items()), end="")
        return 0
    if not args.dags.is_dir():
        raise SaturnError(f"there is no folder {args.dags}; say with --dags where your DAGs are")
    variables = {}
    for text in args.set:
        name, sign, value = text.partition("=")
        if not sign:
            raise SaturnError(f"--set {text}: write NAME=VALUE")
        variables[name] = value
    console = Console()
    end_on_signals()
    cluster = LocalCluster(args.state, args.compose, args.dags, variables)
    begin = time.monotonic()
    try:
        with console.status(f"Starting {len(cluster.services)} services ..."):
            cluster.start()
        with suppress(KeyboardInterrupt):
            console.print(f"Airflow {cluster.airflow_url}   MLflow {cluster.mlflow_url}", highlight=False)
            console.print(cluster.how_to_log_in, highlight=False, soft_wrap=True)
            console.print(
                f"Up after {time.monotonic() - begin:.0f} s; logs in {cluster.processes.logs}. "
                "Ctrl-C stops it.",
                highlight=False,
                soft_wrap=True,
            )
            restarts = cluster.restarts(lambda text: console.print(text, highlight=False, soft_wrap=True))
            while True:
                restarts.look()
                time.sleep(0.5)
        return 0
    finally:
        with console.status("Stopping ..."):
            cluster.stop()
