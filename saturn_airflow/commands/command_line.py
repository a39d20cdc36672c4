"""What several commands have in common."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from saturn_airflow.model.errors import SaturnError
from saturn_airflow.model.printable import printable, without_login

if TYPE_CHECKING:
    from rich.console import Console

    from saturn_airflow.model.sharing import SharingRules

_SHIPPED = Path(__file__).parents[1] / "shipped"
# A wheel brings a copy of what a clone of the repository has at its root.
_ROOT = _SHIPPED if _SHIPPED.is_dir() else Path(__file__).parents[2]
COMPOSE = _ROOT / "docker" / "compose.yaml"
#: Variables by which Airflow finds connections where it has no file of configuration.
_LEAD_TO_CONNECTIONS = (
    "AIRFLOW_CONN_MLFLOW_DEFAULT",
    "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN",
    "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN_CMD",
    "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN_SECRET",
    "AIRFLOW__SECRETS__BACKEND",
)
#: Columns of what is no terminal, where COLUMNS does not say otherwise: wide enough to be read by programs.
_WIDTH = 200


def add_dags(parser: argparse.ArgumentParser) -> None:
    """Declare ``--dags``."""
    parser.add_argument(
        "--dags", type=Path, default=_ROOT / "dags", help="the DAGs folder (that of Saturn's examples)"
    )


def add_uri(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """Declare ``--uri``."""
    parser.add_argument(
        "--uri",
        default=default,
        help="MLflow's tracking URI (default: that of Airflow's connection mlflow_default, else "
        "MLFLOW_TRACKING_URI, else the store in Saturn's home)",
    )


def uri_of(args: argparse.Namespace) -> str:
    """The MLflow that ``--uri`` names, or the one that the sweeps of this deployment write to.

    Where it was not named, it is told on stderr, so that nobody takes one store for another.

    :raises SaturnError: when Airflow's connections can't be read, or there is no store yet.
    """
    if args.uri:
        return str(args.uri)
    uri = _deployments_uri()
    print(f"MLflow: {without_login(uri)}", file=sys.stderr)
    store = uri.removeprefix("sqlite:///")
    if store != uri and not Path(store).exists():
        raise SaturnError(f"there is no MLflow store {store}; name one with --uri or MLFLOW_TRACKING_URI")
    return uri


def _deployments_uri() -> str:
    """The tracking URI of this deployment's sweeps; without Airflow's configuration, the default one."""
    if _has_configuration() or any(name in os.environ for name in _LEAD_TO_CONNECTIONS):
        with suppress(ModuleNotFoundError):
            return _tasks_uri()
    from saturn_airflow import tracking

    return tracking.resolve_uri(home())


def check_number(option: str, value: float | None, least: float, most: float = math.inf) -> None:
    """Check the number that an option was given; None where it was not.

    :raises SaturnError: where it is not from ``least`` to ``most``; infinity and NaN never are.
    """
    if value is None or (math.isfinite(value) and least <= value <= most):
        return
    which = f"of at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
    raise SaturnError(f"{option} {value:g}: give a number {which}")


def home() -> Path:
    """The folder of Saturn's state, as it is configured here."""
    if not os.environ.get("AIRFLOW__SATURN__HOME") and _has_configuration():
        with suppress(ModuleNotFoundError):
            from saturn_airflow.operators import context

            return context.home()
    return Path(os.environ.get("AIRFLOW__SATURN__HOME") or _airflow_home() / "saturn")


def sharing_rules() -> SharingRules:
    """The rules by which the sweeps of this deployment take turns, as it is configured here."""
    from saturn_airflow.model.sharing import SharingRules
    from saturn_airflow.model.teams import Teams

    configured = os.environ.get("AIRFLOW__SATURN__SHARES")
    if configured is None and _has_configuration():
        with suppress(ModuleNotFoundError):
            from saturn_airflow.operators import context

            return context.sharing_rules()
    return SharingRules(shares=Teams.parse(configured or "", "").shares)


def _has_configuration() -> bool:
    """Whether there is a file of Airflow's configuration; Airflow, imported without one, writes it."""
    return Path(os.environ.get("AIRFLOW_CONFIG") or _airflow_home() / "airflow.cfg").expanduser().exists()


def _airflow_home() -> Path:
    return Path(os.environ.get("AIRFLOW_HOME", "~/airflow")).expanduser()


def _tasks_uri() -> str:
    """The tracking URI as a sweep's tasks find it.

    :raises SaturnError: when Airflow's database can't be read.
    """
    # As Airflow's own `airflow connections` does, to see the connections that its database holds.
    os.environ["_AIRFLOW_PROCESS_CONTEXT"] = "server"
    from sqlalchemy.exc import SQLAlchemyError

    from saturn_airflow.operators.context import mlflow_uri

    try:
        return mlflow_uri()
    except SQLAlchemyError as error:
        reason = str(error).partition("\n")[0]
        raise SaturnError(f"Airflow's connections can't be read ({reason}); give --uri") from None


def console() -> Console:
    """A console that colours a terminal alone (rich's own rule), and gives programs wide lines.

    What is told by MLflow or in files of others commands no terminal.
    """
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class Plain(Console):
        def render(
            self, renderable: RenderableType, options: ConsoleOptions | None = None
        ) -> Iterator[Segment]:
            for text, style, control in super().render(renderable, options):
                yield Segment(text if control else printable(text), style, control)

    wide = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Plain(width=_WIDTH if wide else None)
