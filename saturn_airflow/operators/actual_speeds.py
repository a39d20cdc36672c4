"""What finished training says of the strategies it ran under, for later sweeps."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from saturn_airflow.model import guards
from saturn_airflow.model.entries import PlanEntry
from saturn_airflow.model.estimates import Estimate, Key
from saturn_airflow.model.jobs import Job
from saturn_airflow.model.outcomes import Outcome, TrainedSpeed
from saturn_airflow.model.status import Status
from saturn_airflow.profiling.fingerprints import fingerprint

#: A speed that is further off than this share is told.
DRIFT = 0.15
#: What is refused so would be again.
_KNOWN_NEXT = (Status.CHANGES_RESULT, Status.OUT_OF_MEMORY)
#: Seconds between two runs, at the least; and the share by which a clock that is being adjusted may run fast
#: or slow (at most 500 ppm, by adjtime).
_MOMENT, _SLEWED = 0.01, 0.0005


@dataclass(frozen=True)
class Trained:
    """What one job's training from start to end in one run says of its strategy.

    :param key: of the estimate that it tells of.
    :param held: seconds that it had its devices, but for what came to nothing before.
    :param verdict: of the guard; ``own_code`` is what it is of.
    """

    job: str
    key: Key
    parameters: Mapping[str, Any]
    speed: TrainedSpeed
    held: float
    verdict: str | None
    own_code: str | None

    @property
    def ending(self) -> float:
        """Seconds of what is neither launching nor batches nor evaluations: checkpoints, the export."""
        s = self.speed
        evaluations = math.ceil(s.batches / s.batches_per_epoch) if s.batches_per_epoch else 1
        told = s.ready_seconds + s.setup_seconds + s.batches * s.seconds_per_batch
        return max(0.0, self.held - told - evaluations * s.evaluation_seconds)


def trained_in_one_go(
    outcomes: Iterable[Outcome], planned: Mapping[str, PlanEntry] | None = None
) -> list[Trained]:
    """What those say that were trained from start to end in one run.

    :param planned: the plan's entries, for jobs whose technique did not tell its steps.
    """
    found = []
    for o in outcomes:
        speed = o.speed if o.in_one_go else _untold(o, (planned or {}).get(o.job))
        if o.planned and o.held and speed and speed.batches:
            key = Key(o.planned.fingerprint, o.planned.technique, o.planned.devices, o.planned.kind)
            parameters, held = o.planned.parameters, o.held.actual_seconds - _wasted(o)
            found.append(Trained(o.job, key, parameters, speed, held, o.verdict, o.own_code))
    return found


def _wasted(outcome: Outcome) -> float:
    """Seconds on devices before the launch that trained the job in one go: the guard's, or of tries that were
    lost, or refused, before they had saved anything."""
    held, speed = outcome.held, outcome.speed
    if held is None or held.before_seconds is None or speed is None:
        return 0.0
    return max(0.0, held.before_seconds - speed.ready_seconds)


def _untold(outcome: Outcome, entry: PlanEntry | None) -> TrainedSpeed | None:
    """The planned speed, where training said nothing of its own: what it took besides is then known."""
    held = outcome.held
    if outcome.status != Status.FINISHED or outcome.speed or outcome.steps or not (held and entry):
        return None
    in_one_run = held.ended_at - held.started_at < held.actual_seconds * (1 + _SLEWED) + _MOMENT
    planned = outcome.planned
    as_planned = planned is None or (planned.technique, planned.devices) == (entry.technique, entry.devices)
    if not entry.batches or not in_one_run or not as_planned:
        return None
    seconds = min(entry.seconds_per_batch, held.actual_seconds / entry.batches)
    return TrainedSpeed(batches=entry.batches, seconds_per_batch=seconds)


def actual_speeds(outcomes: Sequence[Outcome], entries: Sequence[PlanEntry] = ()) -> list[Estimate]:
    """What the finished jobs' training says of their strategies, for later sweeps; one estimate for each.

    An estimate says where its speed is far from what ``entries`` of the plan said.
    """
    planned = {entry.name: entry for entry in entries}
    alike: dict[tuple[Key, str], list[Trained]] = {}
    for one in trained_in_one_go(outcomes, planned):
        alike.setdefault((one.key, json.dumps(one.parameters, sort_keys=True)), []).append(one)
    seen = [_seen(group, planned) for group in alike.values()]
    refused = {_alike(one): one for one in refused_at_last(outcomes, planned)}
    # Of two that are written at once nobody knows which is the later one.
    found = [_with_refusals(one, refused.pop(_alike(one), None)) for one in seen]
    return [*found, *refused.values()]


def _alike(estimate: Estimate) -> tuple[Key, str, str]:
    return estimate.key, estimate.version, json.dumps(dict(estimate.parameters), sort_keys=True)


def _with_refusals(seen: Estimate, refused: Estimate | None) -> Estimate:
    if refused is None:
        return seen
    return dataclasses.replace(seen, verdicts={**seen.verdicts, **refused.verdicts})


def refused_at_last(outcomes: Sequence[Outcome], planned: Mapping[str, PlanEntry]) -> list[Estimate]:
    """What the guard refused where jobs were to train, and what ran out of memory: the next plan is to know.
    One for each strategy."""
    found: dict[tuple[Key, str, str], Estimate] = {}
    for o, refusal in [(outcome, refusal) for outcome in outcomes for refusal in outcome.refusals]:
        if refusal.status not in _KNOWN_NEXT or (entry := planned.get(o.job)) is None:
            continue
        as_planned = (refusal.technique, refusal.devices) == (entry.technique, entry.devices)
        seconds = entry.seconds_per_batch if as_planned else refusal.seconds
        if not seconds or not _is_of_code_now(entry, o.own_code):
            continue
        one = Estimate(
            fingerprint=entry.fingerprint,
            technique=refusal.technique,
            devices=refusal.devices,
            kind=entry.kind,
            version=refusal.version,
            parameters=refusal.parameters,
            setup_seconds=entry.setup_seconds if as_planned else 0.0,
            seconds_per_batch=seconds,
            verdicts={guards.mark(entry.job, refusal.version): refusal.verdict},
        )
        alike = _alike(one)
        found[alike] = found[alike].joined(one) if alike in found else one
    return list(found.values())


def _is_of_code_now(entry: PlanEntry, trained: str | None) -> bool:
    """Whether what was said of a training is of the job's code as it is here now.

    :param trained: the code that was trained, where that is known.
    """
    return not entry.own_code or {entry.own_code} == {guards.own_code(entry.job), trained or entry.own_code}


def _seen(group: Sequence[Trained], planned: Mapping[str, PlanEntry]) -> Estimate:
    """One estimate from jobs that trained alike, some of them perhaps not as planned."""
    first, speeds = group[0], [one.speed for one in group]
    strategy = first.key.technique, first.key.devices
    entries = {one.job: planned[one.job] for one in group if one.job in planned}
    version = next((entry.version_of(*strategy) for entry in entries.values()), "1")
    batches = sum(s.batches for s in speeds)
    actual = sum(s.seconds_per_batch * s.batches for s in speeds) / batches
    expected = next(
        (e.seconds_per_batch for e in entries.values() if (e.technique, e.devices) == strategy), None
    )
    stale = None
    if expected is not None:
        offs = [s.seconds_per_batch / expected - 1 for s in speeds]
        # Where one of those that trained alike agrees, the others had noise.
        if min(offs) > DRIFT or max(offs) < -DRIFT:
            off = actual / expected - 1
            stale = f"training took {actual:.4g} s per batch, {off:+.0%} against the estimate"
    return Estimate(
        **first.key._asdict(),
        version=version,
        parameters=first.parameters,
        launch_seconds=statistics.fmean(s.ready_seconds for s in speeds),
        setup_seconds=statistics.fmean(s.setup_seconds for s in speeds),
        seconds_per_batch=actual,
        evaluation_seconds=statistics.fmean(s.evaluation_seconds for s in speeds),
        ending_seconds=statistics.fmean(one.ending for one in group),
        spread=statistics.fmean(s.spread for s in speeds),
        batches=batches,
        batches_per_epoch=speeds[0].batches_per_epoch,
        peak_device_bytes=max(s.peak_device_bytes for s in speeds),
        peak_host_bytes=max(s.peak_host_bytes for s in speeds),
        stale=stale,
        verdicts={
            guards.mark(entries[one.job].job, version): one.verdict
            for one in group
            if one.verdict not in (None, guards.TRUSTED)
            and one.job in entries
            and _is_of_code_now(entries[one.job], one.own_code)
        },
    )


def drifted(speeds: Sequence[Estimate], jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """Estimates that training did not bear out."""
    return [
        {
            "jobs": [job.name for job in jobs if fingerprint(job) == e.fingerprint],
            "technique": e.technique,
            "devices": e.devices,
            "kind": e.kind,
            "what": e.stale,
        }
        for e in speeds
        if e.stale
    ]
