"""What several commands have in common."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

#: The clone of the repository, where Saturn runs from one.
ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "docker" / "compose.yaml"
#: Columns of what is no terminal, where COLUMNS does not say otherwise: wide enough to be read by programs.
_WIDTH = 200


def add_dags(parser: argparse.ArgumentParser) -> None:
    """Declare ``--dags``."""
    parser.add_argument(
        "--dags", type=Path, default=ROOT / "dags", help="the DAGs folder (that of the clone)"
    )


def add_uri(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """Declare ``--uri``."""
    parser.add_argument(
        "--uri",
        default=default,
        help="MLflow's tracking URI (default: MLFLOW_TRACKING_URI, else the store in Saturn's home)",
    )


def uri_of(args: argparse.Namespace) -> str:
    """The MLflow that ``--uri`` names, or the one that is configured here."""
    from saturn_airflow import tracking

    default = Path(os.environ.get("AIRFLOW_HOME", "~/airflow")).expanduser() / "saturn"
    home = Path(os.environ.get("AIRFLOW__SATURN__HOME") or default)
    return str(args.uri or tracking.resolve_uri(home))


def console() -> Console:
    """A console that colours a terminal alone (rich's own rule), and gives programs wide lines."""
    from rich.console import Console

    wide = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=_WIDTH if wide else None)
