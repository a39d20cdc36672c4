"""What a train task, or a trial's, tells the jobs of other sweeps that want devices of its node."""

from __future__ import annotations

import time
from collections.abc import Iterable

from saturn_airflow.model.claims import Claim, claim_of, claim_of_trial
from saturn_airflow.model.entries import PlanEntry, Strategy
from saturn_airflow.model.estimates import Trial
from saturn_airflow.model.settings import SweepSettings
from saturn_airflow.model.sharing import SharedSweep
from saturn_airflow.operators.context import SweepContext, sharing_rules


def strategies(entry: PlanEntry) -> tuple[Strategy, ...]:
    """What the job of ``entry`` may run under on its node; in rounds the plan of each says it."""
    if entry.strategies:
        return entry.strategies
    # An earlier version planned it.
    planned = Strategy(
        technique=entry.technique,
        devices=entry.devices,
        parameters=entry.parameters,
        verdict=entry.verdict,
        seconds=entry.planned_seconds,
        setup_seconds=min(entry.setup_seconds, entry.planned_seconds),
        version=entry.version,
    )
    return (planned,)


def leaves_in(found: Iterable[Strategy]) -> float | None:
    """Seconds that a job takes to leave its devices, whatever it runs under; None where they are unknown."""
    return max((s.leaves_in for s in found if s.leaves_in is not None), default=None)


def claim(
    entry: PlanEntry, settings: SweepSettings, sweep: SweepContext, *, anew: bool, ahead: float = 0.0
) -> Claim | None:
    """The claim of the job of ``entry``; None where an earlier version planned it.

    :param anew: whether nothing of what was trained counts.
    :param ahead: seconds by which the node's clock, which all who wait there go by, is ahead of the plan's.
    """
    from saturn_airflow.launch import whereabouts

    if not entry.alone:
        return None
    facts = SharedSweep(
        name=sweep.key,
        jobs=(),
        arrived=entry.arrived + ahead,
        alone=entry.alone,
        priority=settings.priority,
        deadline=None if entry.deadline is None else entry.deadline + ahead,
        preempt=settings.preempt and entry.round is None,
        team=settings.team,
        elsewhere=entry.elsewhere,
    )
    own = strategies(entry)
    seconds = {(s.technique, s.devices): (s.seconds, s.setup_seconds) for s in own}
    done = 0.0 if anew else whereabouts.of(sweep.job_folder(entry.name)).share
    shares = sharing_rules().shares
    found = claim_of(facts, entry.name, entry.technique, seconds, entry.attempt, leaves_in(own), shares)
    return found.with_job(left=max(0.0, 1 - done))


def trial_name(trial: Trial, job: str) -> str:
    """What ``trial`` is called when it is run with ``job``, unique in its sweep."""
    return f"{job} {trial.technique} {trial.devices} {trial.node}"


def trials_claim(trial: Trial, what: str, settings: SweepSettings, sweep: SweepContext, made: float) -> Claim:
    """The claim of a trial that begins to wait.

    :param what: its name.
    :param made: when it was decided to measure, in seconds since the epoch.
    """
    facts = SharedSweep(sweep.key, (), time.time(), 0.0, settings.priority, settings.team)
    shares = sharing_rules().shares
    return claim_of_trial(facts, what, trial.technique, trial.devices, made, shares)
