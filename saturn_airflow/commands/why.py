"""``saturn why``: when the jobs of a sweep are expected to run, and what those that wait are waiting for."""

from __future__ import annotations

import argparse
import json
import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saturn_airflow.commands import command_line
from saturn_airflow.model.errors import SaturnError
from saturn_airflow.model.settings import PROMISED

if TYPE_CHECKING:
    from saturn_airflow.model.active_sweep import ActiveSweep
    from saturn_airflow.model.sharing import SharedCluster, SharedSweep, SharingRules
    from saturn_airflow.sharing.broken_deadlines import LateDeadline
    from saturn_airflow.sharing.forecast import StandingPlan
    from saturn_airflow.sharing.outlook import Outlook


log = logging.getLogger(__name__)

#: Futures that are drawn while somebody waits for the answer: 90% is the 18th of 20.
_DRAWS = 19


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = (
        "Say when the jobs of a sweep are expected to start and to end, which devices those that wait are "
        "waiting for, who holds them until when, and which sweeps go first and why. Without a DAG, list the "
        "active sweeps. What is expected assumes that no further sweep arrives."
    )
    parser.add_argument("dag", nargs="?", metavar="DAG", help="the DAG's id")
    parser.add_argument("jobs", nargs="*", metavar="JOB", help="only these jobs")
    parser.add_argument("--run", metavar="RUN", help="the DAG run's id (default: all that are active)")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.add_argument("--home", type=Path, help="Saturn's folder ([saturn] home; default: as configured)")


def run(args: argparse.Namespace) -> int:
    """Print what is expected of the active sweeps that were asked for."""
    from saturn_airflow.launch.ledger import Ledger
    from saturn_airflow.sharing.broken_deadlines import late
    from saturn_airflow.sharing.forecast import plan_together

    ledger = Ledger(args.home or command_line.home())
    active = ledger.sweeps()
    cluster, rules = ledger.cluster(active), command_line.sharing_rules()
    plan = plan_together(cluster, rules)
    wanted = _wanted(active, args.dag, args.run)
    left = {sweep.name: sweep for sweep in cluster.sweeps}
    found = [_described(cluster, plan, rules, left[a.key], a, args.jobs) for a in wanted if a.key in left]
    broken = late(cluster, rules, plan.sweeps)
    for sweep in found:
        sweep |= _of_deadlines(sweep["sweep"], broken)
    if args.dag is not None:
        for sweep, a in zip(found, [a for a in wanted if a.key in left], strict=True):
            sweep["promised"] = _promised(cluster, rules, active, a)
    if args.jobs and not any(sweep["jobs"] for sweep in found):
        raise SaturnError(
            f"no job of {args.dag!r} that is not done is called {' or '.join(map(repr, args.jobs))}; "
            f"`saturn why {args.dag}` lists them"
        )
    if args.json:
        print(json.dumps(found, indent=2))
    elif args.dag is None:
        _list(found)
    else:
        for sweep in found:
            _show(sweep, cluster.now)
    return 0


def _wanted(active: Sequence[ActiveSweep], dag: str | None, run_id: str | None) -> list[ActiveSweep]:
    """Those of a DAG and run, of all without; of a DAG that has none, an error says which are there."""
    found = [a for a in active if dag in (None, a.dag_id) and run_id in (None, a.run_id)]
    if dag is not None and not found:
        known = ", ".join(sorted({f"{a.dag_id} ({a.run_id})" for a in active}))
        raise SaturnError(
            f"no sweep of {dag!r}{f' in the run {run_id!r}' if run_id else ''} is measured, or planned and "
            f"not done; {f'active are {known}' if known else 'there is no active sweep'}. --home names "
            "another [saturn] home"
        )
    return found


def _described(
    cluster: SharedCluster,
    plan: StandingPlan,
    rules: SharingRules,
    sweep: SharedSweep,
    active: ActiveSweep,
    jobs: Sequence[str],
) -> dict[str, Any]:
    """A sweep as JSON-ready data; moments are seconds since the epoch."""
    from saturn_airflow.sharing.outlook import goes_before, outlooks

    return {
        "sweep": sweep.name,
        "dag_id": active.dag_id,
        "run_id": active.run_id,
        "priority": sweep.priority,
        "team": sweep.team,
        "preempt": sweep.preempt,
        "measured": sweep.trials,
        "deadline": sweep.deadline,
        "end": plan.sweeps.get(sweep.name),
        "runs": sum(job.place is not None for job in sweep.jobs),
        "waits": sum(job.place is None for job in sweep.jobs),
        "before": goes_before(cluster, rules, sweep),
        "jobs": [_job(one) for one in outlooks(cluster, plan, sweep) if not jobs or one.job in jobs],
    }


def _of_deadlines(sweep: str, broken: Sequence[LateDeadline]) -> dict[str, Any]:
    """What a sweep has to do with deadlines that are expected to be missed.

    :returns: ``late``: whether its own is; ``broken_by``: when it would be done without each of the sweeps
        that break it; ``breaks``: those whose deadline would be kept without it.
    """
    own = next((one for one in broken if one.sweep == sweep), None)
    return {
        "late": own is not None,
        "broken_by": dict(own.without) if own else {},
        "breaks": [one.sweep for one in broken if sweep in one.without],
    }


def _promised(
    cluster: SharedCluster, rules: SharingRules, active: Sequence[ActiveSweep], mine: ActiveSweep
) -> dict[str, float] | None:
    """By when the sweep is done with which odds, from how far earlier estimates were off.

    Of sweeps that tell none, the errors are taken to be like this one's.

    :returns: ``odds`` (a share) and ``by`` (seconds since the epoch); None where it tells of no errors.
    """
    from saturn_airflow.planning.online.error_law import ErrorLaw
    from saturn_airflow.sharing.drawn_futures import odds

    if mine.law is None:
        return None
    try:
        laws = {a.key: ErrorLaw.from_dict(mine.law if a.law is None else a.law) for a in active}
    except ValueError as error:
        log.warning("nothing is said of odds: %s", error)
        return None
    by = odds(cluster, rules, laws, draws=_DRAWS).sweeps[mine.key].by(PROMISED)
    return {"odds": PROMISED, "by": by} if math.isfinite(by) else None


def _job(one: Outlook) -> dict[str, Any]:
    """A job as JSON-ready data; ``start`` and ``end`` are seconds since the epoch."""
    place = one.place or (one.expected.place if one.expected else None)
    return {
        "job": one.job,
        "state": "runs" if one.place else "waits" if one.expected else "fits on no node that is up",
        "trained": 1 - one.left,
        "technique": place.technique if place else None,
        "node": place.node if place else None,
        "devices": list(place.device_ids) if place else [],
        "start": one.expected.start if one.expected else None,
        "end": one.expected.end if one.expected else None,
        "waits_for": [vars(holder) | {"device_ids": list(holder.device_ids)} for holder in one.holders],
    }


def _list(found: Sequence[dict[str, Any]]) -> None:
    from rich import box
    from rich.table import Table

    console = command_line.console()
    if not found:
        console.print("No sweep is planned and not done.")
        return
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("sweep", "priority", "run", "wait", "expected end", "deadline"):
        table.add_column(name, justify="right" if name in ("priority", "run", "wait") else "left")
    now = time.time()
    for sweep in found:
        numbers = [f"{sweep['priority']:g}", str(sweep["runs"]), str(sweep["waits"])]
        due = f"{_at(sweep['deadline'], now)}{', missed' if sweep['late'] else ''}"
        end = f"{_at(sweep['end'], now)}{' of its trials' if sweep['measured'] else ''}"
        table.add_row(_escaped(sweep["sweep"]), *numbers, end, due)
    console.print(table)


def _show(sweep: dict[str, Any], now: float) -> None:
    from rich import box
    from rich.table import Table

    console = command_line.console()
    gives_way = ", its jobs may give way" if sweep["preempt"] else ""
    promised = sweep["promised"]
    with_odds = f", with {promised['odds']:.0%} by {_at(promised['by'], now)}" if promised else ""
    head = (
        f"{sweep['sweep']}: expected end {'of its trials ' if sweep['measured'] else ''}"
        f"{_at(sweep['end'], now)}{with_odds} "
        f"(priority {sweep['priority']:g}{gives_way})"
    )
    console.print(head, style="bold", markup=False, highlight=False)
    if sweep["measured"]:
        console.print("It is being measured; what its jobs want is not known until they are planned.")
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("job", "now", "where", "trained", "start", "end"):
        table.add_column(name, justify="right" if name == "trained" else "left", overflow="fold")
    for job in sweep["jobs"]:
        ids = ",".join(map(str, job["devices"]))
        where = f"{job['technique']} on {job['node']}: {ids}" if job["node"] else "-"
        share = f"{100 * job['trained']:.0f}%"
        start, end = (_at(job[key], now) for key in ("start", "end"))
        table.add_row(_escaped(job["job"]), job["state"], _escaped(where), share, start, end)
    console.print(table)
    for job in sweep["jobs"]:
        for line in _waiting(job, sweep["sweep"], now):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    for other, reason in sweep["before"].items():
        console.print(f"{other} goes before it: {reason}", markup=False, highlight=False, soft_wrap=True)
    for line in _deadlines(sweep, now):
        console.print(line, style="bold", markup=False, highlight=False, soft_wrap=True)


def _deadlines(sweep: dict[str, Any], now: float) -> list[str]:
    """Lines on what :func:`_of_deadlines` found."""
    lines = [
        f"it breaks the deadline of {other}, which would be kept without it" for other in sweep["breaks"]
    ]
    if sweep["late"]:
        lines.append(f"its deadline, {_at(sweep['deadline'], now)}, is expected to be missed")
    for other, end in sweep["broken_by"].items():
        lines.append(f"without {other} it would be done at {_at(end, now)}, before its deadline")
    return lines


def _waiting(job: dict[str, Any], sweep: str, now: float) -> list[str]:
    """Lines on whom a job waits for."""
    lines = []
    for holder in job["waits_for"]:
        ids = ",".join(map(str, holder["device_ids"]))
        who = holder["job"] if holder["sweep"] == sweep else f"{holder['sweep']}: {holder['job']}"
        way = (
            ""
            if holder["sweep"] == sweep or holder["gives_way"]
            else ", and does not give way (preempt=False)"
        )
        lines.append(
            f"{job['job']} waits for {job['node']}: {ids}, held by {who} until "
            f"{_at(holder['until'], now)}{way}"
        )
    return lines


def _at(moment: float | None, now: float) -> str:
    """A moment as people read it: the day only where it is not today's."""
    if moment is None:
        return "-"
    then, today = time.localtime(moment), time.localtime(now)
    return time.strftime("%H:%M" if then[:3] == today[:3] else "%Y-%m-%d %H:%M", then)


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)
