"""Plans in the terminal: tables, a chart with a line per device, progress while solving."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table
from rich.text import Text

from saturn_airflow.model.plan import Plan
from saturn_airflow.model.problem import Problem
from saturn_airflow.planning.incumbent import SolveProgress
from saturn_airflow.planning.presenting import baselines
from saturn_airflow.planning.presenting.explaining import explain

_COLOURS = (
    "cyan",
    "magenta",
    "green",
    "yellow",
    "blue",
    "red",
    "bright_cyan",
    "bright_magenta",
    "bright_green",
)
#: Devices that the chart shows.
_MOST_LINES = 64


@contextmanager
def progress() -> Iterator[Callable[[SolveProgress], None]]:
    """Shows a solve's progress on stderr, on one line that is gone afterwards."""
    console = Console(stderr=True)
    with console.status("planning") as status:

        def show(now: SolveProgress) -> None:
            gap = f" · at most {now.gap:.2%} above the best possible" if now.bound > 0 else ""
            status.update(f"{now.seconds:.1f} s · best plan {now.value:,.0f} · bound {now.bound:,.0f}{gap}")

        yield show


def duration(seconds: float) -> str:
    """``11:49:38`` for 42578."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def plan(problem: Problem, plan: Plan) -> None:
    """Print a table of the jobs, a chart of the devices, and what the plan is worth."""
    console = Console()
    explained = explain(problem, plan)
    colours = {a.job: _COLOURS[at % len(_COLOURS)] for at, a in enumerate(plan.assignments)}
    table = Table(title=f"Plan of {problem.name}", title_justify="left")
    for name, justify in (("job", "left"), ("strategy", "left"), ("node", "left"), ("devices", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    table.add_column("start", justify="right")
    table.add_column("end", justify="right")
    for reason in explained.reasons:
        a = reason.assignment
        table.add_row(
            Text(a.job, style=colours[a.job]),
            f"{a.technique} x {a.devices}",
            a.node,
            _ranges(a.device_ids),
            duration(a.start),
            duration(a.end),
        )
    console.print(table)
    _chart(console, problem, plan, colours)
    console.print("\nWhy these strategies:")
    for reason in explained.reasons:
        a = reason.assignment
        line = Text("  ").append(a.job, style=colours[a.job])
        line.append(f" on {a.technique} x {a.devices}: {reason.text}")
        console.print(line)
    console.print()
    console.print(_worth(plan))
    console.print(f"Bounded by {explained.bounded_by}.")
    busy = ", ".join(f"{node} {share:.0%}" for node, share in explained.utilisation.items())
    console.print(f"Devices train {explained.overall:.0%} of the time: {busy}.", highlight=False)


def _worth(plan: Plan) -> str:
    gap = "proven optimal" if plan.gap < 1e-6 else f"at most {plan.gap:.2%} above the best possible"
    if plan.value is not None:
        what = "device-hours" if plan.objective == "device-time" else "hours until a job ends, on average"
        return (
            f"{plan.value / 3600:,.2f} {what} ({gap}); makespan {duration(plan.makespan)}; "
            f"planned in {plan.seconds:.1f} s."
        )
    seconds = f"{plan.makespan:,.0f} s"
    return f"Makespan {duration(plan.makespan)} ({seconds}), {gap}; planned in {plan.seconds:.1f} s."


def _ranges(ids: tuple[int, ...]) -> str:
    """``0-3,6`` for (0, 1, 2, 3, 6)."""
    parts: list[list[int]] = []
    for device in ids:
        if parts and device == parts[-1][-1] + 1:
            parts[-1].append(device)
        else:
            parts.append([device])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def _chart(console: Console, problem: Problem, plan: Plan, colours: dict[str, str]) -> None:
    names = max(len(node.name) for node in problem.nodes)
    width = max(20, min(console.width - names - 6, 120))
    lines = 0
    for node in problem.nodes:
        for device in range(node.devices):
            if lines == _MOST_LINES:
                console.print(f"... and {sum(n.devices for n in problem.nodes) - lines} more devices")
                return
            lines += 1
            line = Text(f"{node.name if device == 0 else '':{names}} {device:>3} ", style="bold")
            at = 0
            own = [a for a in plan.assignments if a.node == node.name and device in a.device_ids]
            for a in sorted(own, key=lambda a: a.start):
                start, end = (round(when / plan.makespan * width) for when in (a.start, a.end))
                line.append("·" * (start - at), style="dim")
                line.append(
                    a.job[: max(0, end - start - 1)].ljust(end - start), style=f"black on {colours[a.job]}"
                )
                at = max(at, end)
            line.append("·" * (width - at), style="dim")
            console.print(line, no_wrap=True, crop=True)


def comparison(problem: Problem, plan: Plan, time_limit: float, *, as_json: bool = False) -> None:
    """Print ``plan`` beside the baselines of :mod:`baselines`; the paper's MILP gets the same time.

    :param time_limit: seconds that planning had.
    :param as_json: the plans as JSON instead of a table.
    """
    found: dict[str, Plan | None] = {
        "current practice": baselines.current_practice(problem),
        "one device per job": baselines.one_device(problem),
        "list scheduling": baselines.listed(problem),
        "MILP of the paper": baselines.upstream(problem, time_limit),
        "saturn": plan,
    }
    if as_json:
        print(json.dumps({name: None if other is None else other.to_dict() for name, other in found.items()}))
        return
    table = Table(title=f"Ways to run {problem.name}", title_justify="left")
    table.add_column("how")
    for name in ("makespan", "ratio", "busy", "device-hours", "planned in"):
        table.add_column(name, justify="right")
    for name, other in found.items():
        if other is None:
            table.add_row(name, "no plan", "", "", "", f"{time_limit:.1f} s")
            continue
        area = sum(a.devices * a.seconds for a in other.assignments)
        devices = sum(node.devices for node in problem.nodes)
        table.add_row(
            name,
            duration(other.makespan),
            "" if other is plan else f"{other.makespan / plan.makespan:.2f}x",
            f"{area / devices / other.makespan:.0%}",
            f"{area / 3600:,.1f}",
            f"{other.seconds:.1f} s",
        )
    console = Console()
    console.print(table)
    console.print(_worth(plan))
