"""Whose turn it is at one node, from the claims of those who wait there and those who hold its devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from saturn_airflow.model.claims import HERE, Claim, node_of
from saturn_airflow.model.plan import Place
from saturn_airflow.model.sharing import SharedCluster, SharedSweep, SharingRules
from saturn_airflow.sharing.pace import at_pace_seen
from saturn_airflow.sharing.ranking import Rank, ranks
from saturn_airflow.sharing.turns import Decision, decide
from saturn_airflow.sharing.use import with_held

#: For how long devices are taken to be busy whose holder does not say how long it needs them.
_UNKNOWN_SECONDS = 60.0


def plan_stands(claims: Iterable[Claim]) -> bool:
    """Whether all jobs are of one plan and go by it: then its order, strategies and devices are best.

    Trials that come between them leave it as it is.
    """
    found = [claim for claim in claims if not claim.sweep.trials]
    return len({(claim.sweep_here, claim.made) for claim in found}) <= 1 and all(c.by_plan for c in found)


def place_in(decision: Decision, mine: Claim) -> Place | None:
    """Where ``mine``, which waits, is to run now; None while it is not its turn."""
    return next((turn.place for turn in decision.starts if (turn.sweep, turn.job) == mine.key), None)


def is_stopped_by(decision: Decision, mine: Claim) -> bool:
    """Whether ``mine``, which runs, is to write its checkpoint and leave, for another or for more devices."""
    return any((turn.sweep, turn.job) == mine.key for turn in decision.stops)


def is_stopped_by_trial(decision: Decision, mine: Claim, trials: Iterable[Claim]) -> bool:
    """Whether ``mine``, which runs, is to leave because one of ``trials`` is to have devices of it."""
    keys = {trial.key for trial in trials}
    taken = {d for turn in decision.next if (turn.sweep, turn.job) in keys for d in turn.place.device_ids}
    return is_stopped_by(decision, mine) and not taken.isdisjoint(mine.job.place_ids)


def ranks_at_a_node(
    waiting: Iterable[Claim],
    holding: Iterable[Claim],
    devices: int,
    now: float,
    rules: SharingRules,
    used: Mapping[str, float] | None = None,
) -> dict[str, Rank]:
    """The turns of the sweeps of all claims, by their names here.

    Takes what :func:`decision_at_a_node` takes.
    """
    return ranks(*_at_node(waiting, holding, (), devices, now, rules, used))


def trained(mine: Claim, share: float, now: float) -> Claim:
    """``mine``, which runs, when it has trained this share of its batches.

    :param share: of all its batches, from 0 to 1.
    """
    # What has trained more than it had before is set up.
    had = max(0.0, now - mine.job.since)  # somebody may set the clock
    setup = max(0.0, mine.job.option.setup - had) if share <= 1 - mine.job.left else 0.0
    return mine.with_job(left=max(0.0, 1 - share), setting_up=setup)


def decision_at_a_node(
    waiting: Iterable[Claim],
    holding: Iterable[Claim],
    busy: Iterable[int],
    devices: int,
    now: float,
    rules: SharingRules,
    used: Mapping[str, float] | None = None,
) -> Decision:
    """What is to be done at a node now.

    :param waiting: all who wait.
    :param holding: those who have their place.
    :param busy: devices that are held by, or kept for, what is no job of a sweep.
    :param devices: how many the node has.
    :param now: seconds since the epoch.
    :param used: by team, what it used of the node's devices before those who have their place.
    """
    return decide(*_at_node(waiting, holding, busy, devices, now, rules, used))


def _at_node(
    waiting: Iterable[Claim],
    holding: Iterable[Claim],
    busy: Iterable[int],
    devices: int,
    now: float,
    rules: SharingRules,
    used: Mapping[str, float] | None,
) -> tuple[SharedCluster, SharingRules]:
    """The node as a cluster of its own, and the rules of who is there."""
    used = used or {}
    waiting = list(waiting)
    placed: list[Claim] = []
    taken: set[int] = set()
    unknown = set(busy)
    for claim in holding:
        ids = set(claim.job.place_ids)
        # A claim may say what can't be, such as a device that another one has.
        if not ids <= set(range(devices)) or ids & taken:
            unknown |= ids
            continue
        taken |= ids
        placed.append(_still_leaving(claim, now))
        used = with_held(used, claim.sweep.team, len(ids), now - claim.job.since)
    until = {(HERE, device): now + _UNKNOWN_SECONDS for device in unknown - taken}
    claims = [*placed, *waiting]
    cluster = SharedCluster(now, (node_of(devices),), _sweeps(claims, rules), until, used)
    return cluster, replace(rules, shares=_shares(claims))


def _shares(claims: Iterable[Claim]) -> Mapping[str, float]:
    """The shares of the newest claim: all who wait must decide by the same, though they came with others."""
    newest = max(claims, key=lambda claim: (claim.made, claim.key), default=None)
    return {} if newest is None else newest.shares


def _still_leaving(claim: Claim, now: float) -> Claim:
    """``claim``, whose job may take longer to leave than it was to: its devices are not free yet."""
    leaving = claim.job.leaving
    return claim if leaving is None or leaving > now else claim.with_job(leaving=now + 1.0)


def _sweeps(claims: Iterable[Claim], rules: SharingRules) -> tuple[SharedSweep, ...]:
    """The sweeps of all claims, each with its jobs; of two claims of one job the first counts."""
    found: dict[str, dict[str, Claim]] = {}
    for claim in claims:
        found.setdefault(claim.sweep_here, {}).setdefault(claim.job.name, claim)
    return tuple(replace(_together(by_job, rules), name=name) for name, by_job in found.items())


def _together(by_job: Mapping[str, Claim], rules: SharingRules) -> SharedSweep:
    """The sweep of these claims, with the seconds to be expected after what was seen of those that run."""
    newest = max(by_job.values(), key=lambda claim: (claim.made, claim.job.name))
    sweep = replace(newest.sweep, jobs=tuple(by_job[name].job for name in sorted(by_job)))
    paces = {name: claim.pace for name, claim in by_job.items() if claim.pace is not None}
    return at_pace_seen(sweep, paces, {HERE: HERE}, rules.off_by) if paces else sweep


def as_seen(mine: Claim, rules: SharingRules) -> Claim:
    """``mine`` with the seconds to be expected after how fast it was seen to train where it runs."""
    return replace(mine, sweep=_together({mine.job.name: mine}, rules))
