"""The other sweeps of the deployment: what a plan must know of them, and what they are told of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.sdk import Context

from saturn_airflow.model.active_sweep import ActiveSweep
from saturn_airflow.model.claims import TRIAL_SECONDS
from saturn_airflow.model.cluster import Cluster
from saturn_airflow.model.entries import PlanEntry
from saturn_airflow.model.estimates import Trial
from saturn_airflow.model.plan import Place
from saturn_airflow.model.problem import Option, PlannedJob, Problem
from saturn_airflow.model.settings import SweepSettings
from saturn_airflow.model.sharing import SharedCluster, SharedJob, SharedSweep, least_seconds
from saturn_airflow.operators.context import SweepContext, home, sharing_rules
from saturn_airflow.operators.making_claims import leaves_in, trial_name

if TYPE_CHECKING:
    from saturn_airflow.deciding.next_round import DecidedRound, SweepState
    from saturn_airflow.planning.online.error_law import ErrorLaw
    from saturn_airflow.planning.online.execution import Situation

log = logging.getLogger(__name__)

_ACTIVE = ["queued", "running"]
#: The sweeps that were active beside one when it was planned.
OTHERS_KEY = "others"


def around_others(problem: Problem, others: SharedCluster, own: Collection[Place]) -> Problem:
    """``problem`` with the moments at which the jobs of ``others`` that run leave its devices.

    :param own: where its own jobs run.
    """
    from saturn_airflow.sharing.among import around

    found = around(problem, others, sharing_rules(), own)
    for node, moments in found.free.items():
        told = ", ".join(f"{at:.0f}" for at in moments)
        log.info("Other sweeps have devices of %s: each is free in so many seconds: %s", node, told)
    return found


def among_others(
    state: SweepState,
    problem: Problem,
    situation: Situation,
    decided: DecidedRound,
    facts: SharedSweep,
    others: SharedCluster,
) -> DecidedRound:
    """``decided``; where other sweeps are active on its nodes, with what is to be expected among them.

    :param problem: whole jobs, with the seconds now expected, on the nodes that are there.
    :param situation: where they stand.
    :param decided: what was decided around the jobs of others that run.
    :param facts: of the sweep that is planned.
    """
    from saturn_airflow.deciding.among_others import decide_among
    from saturn_airflow.sharing.among import meets_others

    if not meets_others(problem, others):
        return decided
    try:
        found = decide_among(state, problem, situation, decided, facts, others, sharing_rules())
    except AssertionError:
        # What others are at must not cost this sweep its plan.
        log.exception("Planned as if no other sweep waited, for a mistake of Saturn's: please report it")
        return decided
    if found is None:
        log.warning("Other sweeps leave no place for all jobs: planned as if none waited")
        return decided
    log.info(
        "Planned among %d other sweeps: done in %.1f s, which would be %.1f s if none of them waited",
        *(len(others.sweeps), found.adoption.plan.makespan, decided.adoption.plan.makespan),
    )
    return found


def tell_others(
    sweep: SweepContext,
    facts: SharedSweep,
    problem: Problem,
    entries: Sequence[PlanEntry],
    law: ErrorLaw | None,
) -> None:
    """Let the plans of others know of this one; where that can't be, they plan as if it were not.

    :param law: of the errors of its estimates.
    """
    jobs = {job.name: job for job in problem.jobs}
    told = tuple(
        SharedJob(
            _bound(jobs[entry.name], entry.node),
            leaves_in=leaves_in(entry.strategies),
            keeps=None if entry.round is None else (entry.technique, entry.devices),
        )
        for entry in entries
    )
    made = max((entry.attempt for entry in entries), default=0.0)
    known = None if law is None else law.to_dict()
    _tell(sweep, sweep.folder, made=made, nodes=problem.nodes, sweep=replace(facts, jobs=told), law=known)


def tell_of_trials(
    sweep: SweepContext, settings: SweepSettings, trials: Sequence[Mapping[str, Any]], cluster: Cluster
) -> None:
    """Let others know of a sweep that is measured: what it is, and which devices its trials want.

    What its jobs are going to want is told by its plan.

    :param trials: as profile tasks take them.
    """
    if not trials:
        return
    kinds = {node.name: node.kind for node in cluster}
    planned = tuple(_as_job(Trial.from_dict(one), kinds) for one in trials)
    now = time.time()
    facts = SharedSweep(
        name=sweep.key,
        jobs=tuple(map(SharedJob, planned)),
        arrived=now,
        alone=least_seconds(planned, cluster.nodes),
        priority=settings.priority,
        team=settings.team,
        trials=True,
    )
    _tell(sweep, sweep.folder / "trials", made=now, nodes=cluster.nodes, sweep=facts)


def _tell(of: SweepContext, folder: Path, **facts: Any) -> None:
    """Write down for others what a sweep is, whose runs lie in ``folder``.

    :param facts: as :class:`~saturn_airflow.model.active_sweep.ActiveSweep` has them.
    """
    from saturn_airflow.launch.ledger import Ledger

    where = str(folder.relative_to(home()))
    try:
        Ledger(home()).write(ActiveSweep(dag_id=of.dag_id, run_id=of.run_id, folder=where, **facts))
    except OSError as error:
        log.warning("The plans of other sweeps don't know of this one: %s", error)


def _as_job(trial: Trial, kinds: Mapping[str, str]) -> PlannedJob:
    """``trial`` as others see it, called as its folder is."""
    option = Option(trial.technique, trial.devices, {kinds[trial.node]: TRIAL_SECONDS})
    return PlannedJob(trial_name(trial, trial.job.name), (option,), (trial.node,))


def forget(sweep: SweepContext) -> None:
    """``sweep`` has ended."""
    from saturn_airflow.launch.ledger import Ledger

    Ledger(home()).remove(sweep.key)


def others_now(context: Context, key: str, problem: Problem) -> SharedCluster:
    """The active sweeps beside that of ``key``, on their nodes and those of ``problem``.

    Those whose DAG run has ended without a word, or was deleted, are forgotten.
    """
    from saturn_airflow.launch.ledger import Ledger

    ledger = Ledger(home())
    found = []
    for active in ledger.sweeps():
        if active.key == key:
            continue
        if not _may_be_active(context["ti"], active):
            ledger.remove(active.key)
        else:
            found.append(active)
    return ledger.cluster(found, problem.nodes)


def wins_elsewhere(sweep: SweepContext, entries: Sequence[PlanEntry], before: Collection[str]) -> float:
    """The share of its plan by which ``sweep`` would be done earlier if what waits went to other nodes.

    0 where the others are those that it was planned among, unless it is late by as much.

    :param entries: of the plan.
    :param before: the sweeps that were active beside it then.
    """
    from saturn_airflow.launch.ledger import Ledger
    from saturn_airflow.sharing.elsewhere import look_elsewhere

    ledger = Ledger(home())
    active = ledger.sweeps()
    cluster = ledger.cluster(active, whole=sweep.key)
    own = next((one for one in active if one.key == sweep.key), None)
    makespan = max((entry.planned_makespan or 0.0 for entry in entries), default=0.0)
    if makespan <= 0 or own is None:
        return 0.0
    names = [node.name for node in own.nodes]
    nodes_of = {e.name: tuple(n for n in names if n in (e.job.nodes or names)) for e in entries}
    try:
        found = look_elsewhere(cluster, sharing_rules(), sweep.key, nodes_of)
    except AssertionError:
        log.exception("Nobody knows whether to plan anew, for a mistake of Saturn's: please report it")
        return 0.0
    won = found.won / makespan
    late = (found.here - entries[0].attempt) / makespan - 1
    is_as_planned = set(cluster.planned) - {sweep.key} == set(before)
    return 0.0 if is_as_planned and late < won else won


def _bound(job: PlannedJob, node: str) -> PlannedJob:
    """``job`` as others plan with it: bound to the node that it was planned on."""
    return PlannedJob(job.name, job.options, (node,))  # what else it says was for the plan


def _may_be_active(ti: Any, active: ActiveSweep) -> bool:
    """Whether its DAG run goes on, as far as Airflow says."""
    return bool(ti.get_dr_count(dag_id=active.dag_id, run_ids=[active.run_id], states=_ACTIVE))
