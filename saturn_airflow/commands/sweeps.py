"""``saturn sweeps``: what earlier sweeps did, and how far those that run have come, as MLflow tells it."""

from __future__ import annotations

import argparse
import json
import shlex
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from saturn_airflow.commands import command_line
from saturn_airflow.model.printable import in_short

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {"finished": "green", "failed": "red", "running": "cyan", "pruned": "dim", "stopped": "yellow"}
#: What MLflow gives in one answer.
_MOST_SWEEPS = 50_000


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    _options(parser)
    parser.set_defaults(action="list")
    actions = parser.add_subparsers(metavar="action", dest="action")
    listed = actions.add_parser("list", help="the latest sweeps (what happens without an action)")
    _options(listed, argparse.SUPPRESS)
    shown = actions.add_parser("show", help="one sweep and its jobs")
    shown.add_argument(
        "sweep",
        help="a DAG's id for its latest sweep, a sweep's name as the list has it, or its MLflow run id",
    )
    _options(shown, argparse.SUPPRESS, listing=False)


def _options(parser: argparse.ArgumentParser, default: Any = None, listing: bool = True) -> None:
    if listing:
        parser.add_argument("--dag", metavar="ID", default=default, help="only sweeps of this DAG")
        limit = 20 if default is None else default
        parser.add_argument("--limit", type=int, metavar="N", default=limit, help="how many at the most (20)")
    parser.add_argument("--json", action="store_true", default=default or False, help="print it as JSON")
    command_line.add_uri(parser, default)


def run(args: argparse.Namespace) -> int:
    """List, or show one."""
    from saturn_airflow.tracking import sweep_runs

    uri = command_line.uri_of(args)
    if args.action == "show":
        found: Any = sweep_runs.one(uri, args.sweep)
    else:
        command_line.check_number("--limit", args.limit, 1, _MOST_SWEEPS)
        found = sweep_runs.recent(uri, args.limit, args.dag)
    if args.json:
        print(json.dumps(found, indent=2))
    elif args.action == "show":
        _show(found)
    else:
        _list(found)
    return 0


def _list(found: Sequence[Mapping[str, Any]]) -> None:
    console = command_line.console()
    if not found:
        console.print("MLflow knows no sweep.")
        return
    columns = ("status", "started", "jobs", "planned", "gap", "actual", "busy", "best")
    rows = []
    for sweep in found:
        best = sweep["best"]
        rows.append(
            [
                sweep["sweep"],
                sweep["status"],
                _moment(sweep["started_at"]),
                str(sweep["jobs"]),
                _seconds(sweep["planned_seconds"]),
                _share(sweep["gap"], 1),
                _seconds(sweep["actual_seconds"]),
                _share(sweep["utilisation"]),
                f"{best['job']} ({best['metric']} {best['value']:.4g})" if best else "-",
            ]
        )
    _table(console, ("sweep", *columns), rows, right=("jobs", "planned", "gap", "actual", "busy"))


def _show(sweep: Mapping[str, Any]) -> None:
    console = command_line.console()
    columns = ("job", "status", "technique", "devices", "node", "planned", "actual", "loss", "eval loss")
    own = list(dict.fromkeys(name for job in sweep["jobs"] for name in job["metrics"]))
    rows = [
        [
            job["job"],
            job["status"].replace("_", " "),
            job["technique"] or "-",
            "-" if job["devices"] is None else str(job["devices"]),
            job["node"] or "-",
            _seconds(job["planned_seconds"]),
            _seconds(job["actual_seconds"]),
            _number(job["loss"]),
            _number(job["eval_loss"]),
            *(_number(job["metrics"].get(name)) for name in own),
        ]
        for job in sweep["jobs"]
    ]
    console.print(f"{sweep['sweep']}  {sweep['status']}", style="bold", markup=False)
    right = ("devices", "planned", "actual", "loss", "eval loss", *own)
    _table(console, (*columns, *own), rows, right)
    reasons = {job["job"]: job["reason"] for job in sweep["jobs"] if job["reason"]}
    for name, reason in reasons.items():
        _line(console, f"{name}: {in_short(reason)}")
    if any(in_short(reason) != reason.strip() for reason in reasons.values()):
        whole = f"saturn sweeps show {shlex.quote(sweep['sweep'])} --json"
        _line(console, f"tracebacks: `{whole}` has them, as have the logs of the jobs' tasks")
    if sweep["planned_seconds"] is not None:
        _line(
            console,
            f"makespan: planned {_seconds(sweep['planned_seconds'])} (gap {_share(sweep['gap'], 1)})"
            f"{_promised(sweep)}, actual {_seconds(sweep['actual_seconds'])}; "
            f"devices busy {_share(sweep['utilisation'])} of it",
        )
    if best := sweep["best"]:
        where = f" {best['model_uri']}" if best["model_uri"] else ""
        _line(console, f"best: {best['job']} ({best['metric']} {best['value']:.4g}){where}")
    for name, key in (("MLflow ", "url"), ("Airflow", "airflow_url")):
        if sweep[key]:
            _line(console, f"{name} {sweep[key]}")


def _table(
    console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str]
) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    status = columns.index("status")
    for row in rows:
        cells = [Text(cell) for cell in row]
        cells[status].stylize(_STYLES.get(row[status], ""))
        table.add_row(*cells)
    console.print(table)


def _line(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _promised(sweep: Mapping[str, Any]) -> str:
    if sweep["promised_seconds"] is None or sweep["promised_odds"] is None:
        return ""
    return f", with {_share(sweep['promised_odds'])} done in {_seconds(sweep['promised_seconds'])}"


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    if value < 120:
        return f"{value:.1f} s"
    return f"{value / 60:.1f} min" if value < 7200 else f"{value / 3600:.1f} h"


def _share(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{100 * value:.{digits}f}%"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
