"""``saturn estimates``: how fast jobs train under which strategy, as far as earlier sweeps know."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

from saturn_airflow.commands import command_line
from saturn_airflow.model import guards

if TYPE_CHECKING:
    from saturn_airflow.tracking.estimate_store import KnownEstimate


#: Verdicts that the table has room to explain.
_EXPLAINED = (guards.REFUSED, guards.NOT_CHECKED)


def add(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("jobs", nargs="*", help="names of jobs, or patterns such as 'gpt2-*' (default: all)")
    parser.add_argument("--technique", metavar="NAME", help="only of this technique")
    parser.add_argument("--kind", help="only of this kind of device")
    parser.add_argument(
        "--failed", action="store_true", help="only of strategies that can't run, with the reason"
    )
    parser.add_argument("--json", action="store_true", help="print them as JSON")
    command_line.add_uri(parser)


def run(args: argparse.Namespace) -> int:
    """Print the estimates that match."""
    from saturn_airflow import tracking

    known = tracking.estimate_store.everything(command_line.uri_of(args))
    found = sorted(filter(lambda k: _matches(k, args), known), key=_order)
    if args.json:
        print(json.dumps([_row(k) for k in found], indent=2))
    else:
        _show(found, len(known))
    return 0


def _matches(known: KnownEstimate, args: argparse.Namespace) -> bool:
    estimate = known.estimate
    return (
        (not args.jobs or any(fnmatch(known.job, pattern) for pattern in args.jobs))
        and args.technique in (None, estimate.technique)
        and args.kind in (None, estimate.kind)
        and not (args.failed and estimate.works)
    )


def _order(known: KnownEstimate) -> tuple[Any, ...]:
    """Jobs by name; of each, what works first, the fastest first."""
    e = known.estimate
    return known.job, e.fingerprint, e.kind, e.reason is not None, e.seconds_per_batch, e.technique, e.devices


def _row(known: KnownEstimate) -> dict[str, Any]:
    return {
        "job": known.job,
        **known.estimate.to_dict(),
        "source": known.source,
        "age_seconds": round(time.time() - known.estimate.observed_at),
        "versions": dict(known.versions),
    }


def _show(found: Sequence[KnownEstimate], count: int) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("job", overflow="fold", min_width=12)
    for name in ("technique", "devices"):
        table.add_column(name, no_wrap=True)
    for name in ("s/batch", "spread", "set-up", "memory", "source", "age"):
        table.add_column(name, justify="left" if name == "source" else "right", no_wrap=True)
    table.add_column("result", overflow="fold")
    table.add_column("note", overflow="fold")
    job = None
    for known in found:
        e = known.estimate
        numbers = ["-"] * 4
        if e.works:
            numbers = [
                f"{e.seconds_per_batch:.4g}",
                f"{e.spread:.0%}",
                f"{e.launch_seconds + e.setup_seconds:.1f} s",
                f"{e.peak_device_bytes / 2**30:.2f} GiB",
            ]
        verdicts = dict.fromkeys(map(guards.in_words, e.verdicts.values()))
        note = e.reason or e.stale or next((v for v in verdicts if v.startswith(_EXPLAINED)), "")
        table.add_row(
            Text(known.job if known.job != job else ""),
            e.technique,
            f"{e.devices} x {e.kind}",
            *numbers,
            known.source,
            _age(time.time() - e.observed_at),
            Text(", ".join(dict.fromkeys(v.partition(":")[0] for v in verdicts)) or "-"),
            Text(note.splitlines()[0] if note else ""),
            style="dim" if not e.works else "yellow" if e.stale else None,
        )
        job = known.job
    console = command_line.console()
    if found:
        console.print(table)
    console.print(
        f"{len(found)} of {count} estimates" if count else "No estimates yet: no sweep has measured."
    )


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
