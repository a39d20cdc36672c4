"""All that the page of the cluster shows: nodes and devices over time, with the active sweeps of all DAGs."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Set
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from saturn_airflow.launch.ledger import Ledger
from saturn_airflow.model.active_sweep import ActiveSweep
from saturn_airflow.model.sharing import SharedCluster, SharedSweep
from saturn_airflow.operators.context import sharing_rules
from saturn_airflow.planning.online.error_law import ErrorLaw
from saturn_airflow.sharing.broken_deadlines import LateDeadline, late
from saturn_airflow.sharing.drawn_futures import odds
from saturn_airflow.sharing.forecast import StandingPlan, plan_together
from saturn_airflow.sharing.outlook import Outlook, goes_before, outlooks
from saturn_airflow.sharing.replay import Key

#: For so many seconds everybody gets the same answer: how far jobs are is read from many files.
_SECONDS = 10
_HIDDEN = "another sweep"
#: Futures that are drawn to tell by when a sweep is done, of how many jobs at the most (somebody waits for
#: the answer), and the probability it is told for.
_DRAWS, _JOBS, _ODDS = 19, 30, 0.9

DagRunId = tuple[str, str]
"""Ids of a DAG and of its run."""
Ended = Callable[[Set[DagRunId]], Set[DagRunId]]
"""Tells which of some DAG runs have ended."""

log = logging.getLogger(__name__)


def cluster_page(home: Path, now: float, readable: Collection[str], ended: Ended) -> dict[str, Any]:
    """What the page shows, as it was some seconds ago: ``at``, from which all other seconds count.

    :param home: Saturn's folder (``[saturn] home``).
    :param now: seconds since the epoch.
    :param readable: ids of the DAGs that the user may read; of others it is told that devices are busy, not
        with what.
    :param ended: tells which of some DAG runs have ended. Their sweeps are left out, though nobody said so.
    """
    moment = int(now // _SECONDS)
    over = frozenset(ended({(one.dag_id, one.run_id) for one in _active(home, moment)}))
    active, cluster, plan, by, broken = _read_state(home, moment, over)
    now = cluster.now
    shared = {sweep.name: sweep for sweep in cluster.sweeps}
    names = {one.key: one.key if one.dag_id in readable else _HIDDEN for one in active}
    sweeps, jobs = [], []
    for number, one in enumerate(one for one in active if one.key in shared):
        sweep, is_hidden = shared[one.key], names[one.key] == _HIDDEN
        told = _sweep(one, sweep, cluster, plan, by, names, now)
        sweeps.append(told | _of_deadlines(one.key, broken, names))
        for outlook in outlooks(cluster, plan, sweep):
            jobs.append(_job(outlook, number, is_hidden, now, by.jobs.get((one.key, outlook.job))))
    return {
        "at": now,
        "now": 0.0,
        "live": True,
        "is_cluster": True,
        "nodes": [node.to_dict() for node in cluster.nodes],
        "sweeps": sweeps,
        "jobs": jobs,
        "rounds": [],
        "totals": {},
    }


class _DoneBy(NamedTuple):
    """By when sweeps and jobs are done with odds of 90%, in seconds since the epoch."""

    sweeps: dict[str, float]
    jobs: dict[Key, float]


@lru_cache(maxsize=1)
def _active(home: Path, moment: int) -> list[ActiveSweep]:
    """The active sweeps; ``moment`` (tens of seconds since the epoch) makes the answer of before stale."""
    return Ledger(home).sweeps()


@lru_cache(maxsize=1)
def _read_state(
    home: Path, moment: int, over: frozenset[DagRunId]
) -> tuple[list[ActiveSweep], SharedCluster, StandingPlan, _DoneBy, list[LateDeadline]]:
    """The active sweeps that are not over, the cluster, its plan, by when all is done, and who is late."""
    active = [one for one in _active(home, moment) if (one.dag_id, one.run_id) not in over]
    cluster, rules = Ledger(home).cluster(active), sharing_rules()
    plan = plan_together(cluster, rules)
    return active, cluster, plan, _done_by(cluster, active), late(cluster, rules, plan.sweeps)


def _done_by(cluster: SharedCluster, active: list[ActiveSweep]) -> _DoneBy:
    """By when each sweep and job is done with odds of 90%, where it was told how far estimates were off.

    Of others, the errors are taken to be like those of the first that tells.
    """
    try:
        laws = {one.key: ErrorLaw.from_dict(one.law) for one in active if one.law is not None}
    except ValueError as error:
        log.warning("nothing is said of odds: %s", error)
        return _DoneBy({}, {})
    if not laws or sum(len(sweep.jobs) for sweep in cluster.sweeps) > _JOBS:
        return _DoneBy({}, {})
    every = dict.fromkeys((sweep.name for sweep in cluster.sweeps), next(iter(laws.values()))) | laws
    ends = odds(cluster, sharing_rules(), every, draws=_DRAWS)
    sweeps = {name: found.by(_ODDS) for name, found in ends.sweeps.items() if name in laws}
    jobs = {key: found.by(_ODDS) for key, found in ends.jobs.items() if key[0] in laws}
    return _DoneBy(
        {name: by for name, by in sweeps.items() if math.isfinite(by)},
        {key: by for key, by in jobs.items() if math.isfinite(by)},
    )


def _of_deadlines(key: str, broken: list[LateDeadline], names: dict[str, str]) -> dict[str, Any]:
    """The sweeps that break its deadline, and those whose it breaks; none where it has no name here."""
    if names[key] == _HIDDEN:
        return {"broken_by": [], "breaks": []}
    own = next((one for one in broken if one.sweep == key), None)
    return {
        "broken_by": [names[other] for other in own.without] if own else [],
        "breaks": [names[one.sweep] for one in broken if key in one.without],
    }


def _sweep(
    active: ActiveSweep,
    sweep: SharedSweep,
    cluster: SharedCluster,
    plan: StandingPlan,
    by: _DoneBy,
    names: dict[str, str],
    now: float,
) -> dict[str, Any]:
    """A sweep as the list beside the chart shows it; times are seconds from ``now``."""
    end = plan.sweeps.get(sweep.name)
    told = {
        "runs": sum(job.place is not None for job in sweep.jobs),
        "waits": sum(job.place is None for job in sweep.jobs),
        "end": None if end is None else end - now,
        "by": by.sweeps[sweep.name] - now if sweep.name in by.sweeps else None,
        "odds": _ODDS,
        "priority": sweep.priority,
        "measured": sweep.trials,
    }
    if names[sweep.name] == _HIDDEN:
        return {**told, "dag_id": None, "run_id": None, "sweep": None, "deadline": None, "before": []}
    before = goes_before(cluster, sharing_rules(), sweep)
    return {
        **told,
        "dag_id": active.dag_id,
        "run_id": active.run_id,
        "sweep": active.key.removeprefix(f"{active.dag_id}/{active.run_id}/"),
        "deadline": None if sweep.deadline is None else sweep.deadline - now,
        "before": [{"sweep": names[other], "why": why} for other, why in before.items()],
    }


def _job(outlook: Outlook, sweep: int, is_hidden: bool, now: float, by: float | None) -> dict[str, Any]:
    """A job as the chart draws it: what it has run so far is actual, what is expected is planned.

    :param sweep: its sweep's place in the list.
    :param now: seconds since the epoch; in the answer, times are seconds from it.
    :param by: when it is done with odds of 90%, in seconds since the epoch.
    """
    bars = []
    for number, stay in enumerate(outlook.expected.stays if outlook.expected else ()):
        runs = outlook.place is not None and number == 0
        start, end = stay.start - now, stay.end - now
        if runs and outlook.expected:
            start = outlook.expected.start - now
        bar = {
            "technique": "" if is_hidden else stay.place.technique,
            "devices": stay.place.devices,
            "node": stay.place.node,
            "device_ids": list(stay.place.device_ids),
            "status": "running" if runs else "waiting",
            "planned": [start, end],
            "planned_start": start,
            "planned_seconds": end - start,
            "actual": [start, 0.0] if runs else None,
            "round": 1,
        }
        bars.append(bar)
    name, status = _HIDDEN if is_hidden else outlook.job, "running" if outlook.place else "waiting"
    return {
        "name": name,
        "sweep": sweep,
        "status": status,
        "bars": bars,
        "trained": 1 - outlook.left,
        "by": None if by is None else by - now,
        "odds": _ODDS,
    }
