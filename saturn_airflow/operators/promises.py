"""Ends with odds: what the errors of earlier sweeps say of this one's end, and what became of that."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from saturn_airflow.model.entries import PlanEntry
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.estimates import Estimate
from saturn_airflow.model.outcomes import Outcome
from saturn_airflow.model.past_errors import PastError
from saturn_airflow.model.status import Status

if TYPE_CHECKING:
    from saturn_airflow.planning.online.ends import PlanEnds
    from saturn_airflow.planning.online.error_law import ErrorLaw

log = logging.getLogger(__name__)


#: Seconds that Airflow takes from a plan until its train tasks ask for devices, where no sweep tells yet.
ASKS_IN = 2.0
#: Who is to begin so many seconds after that or less begins with it.
_AT_ONCE = 0.1
#: The latest sweeps that tell how long that takes.
_LATEST = 9


class Experience(NamedTuple):
    """What earlier sweeps say of errors.

    :param fresh: whether most estimates of this sweep are of trials, not of earlier trainings; only sweeps
        that are alike in that count for the law.
    :param law: None where nothing is known of it; then ``why`` says why.
    :param asks_in: seconds from a plan until its jobs ask for devices.
    """

    fresh: bool
    law: ErrorLaw | None
    why: str | None
    asks_in: float = ASKS_IN

    @classmethod
    def of(cls, uri: str, dag_id: str, key: str, estimates: Iterable[Estimate]) -> Experience:
        """What MLflow knows: of this DAG's sweeps, else of all.

        :param key: of this sweep, whose own errors do not count.
        :param estimates: those that it is planned with.
        """
        from saturn_airflow.planning.online.error_law import fit
        from saturn_airflow.tracking import error_history
        from saturn_airflow.tracking.server import TrackingError

        fresh = is_fresh(estimate.source for estimate in estimates if estimate.works)
        why = asked = None
        for dag in (dag_id, None):
            try:
                earlier = [one for one in error_history.find(uri, dag) if one.sweep != key]
            except TrackingError as error:  # asked again, it would keep the plan waiting once more
                why = f"MLflow, which has how far earlier estimates were off, does not answer ({error})"
                break
            took = [one.asked_in for one in earlier if one.asked_in is not None][:_LATEST]
            asked = statistics.median(took) if asked is None and took else asked
            alike = [one for one in earlier if one.fresh == fresh]
            try:
                law = fit(error for one in alike for error in one.errors)
                return cls(fresh, law, None, ASKS_IN if asked is None else asked)
            except InvalidSweepError as error:
                why = str(error)
        return cls(fresh, None, why, ASKS_IN if asked is None else asked)


def is_fresh(sources: Iterable[str]) -> bool:
    """Whether most estimates are not of earlier trainings."""
    every = list(sources)
    return 2 * sum(source != "history" for source in every) > len(every)


def told(experience: Experience, ends: PlanEnds | None, confidence: float) -> dict[str, Any]:
    """The promise of a plan as the page and the report read it; seconds count from the plan.

    :returns: ``confidence``, ``seconds`` (by when all is done with these odds), ``median``, ``jobs`` (the
        first of these by job), ``errors`` and ``sweeps`` (how many it rests on), ``fresh``; with ``why``
        instead of seconds where nothing is known.
    """
    common: dict[str, Any] = {"confidence": confidence, "fresh": experience.fresh}
    if ends is None or experience.law is None:
        return {**common, "why": experience.why}
    return {
        **common,
        "seconds": ends.sweep.by(confidence),
        "median": ends.sweep.median,
        "jobs": {job: of_job.by(confidence) for job, of_job in ends.jobs.items()},
        "errors": experience.law.errors,
        "sweeps": experience.law.sweeps,
    }


def in_words(promise: Mapping[str, Any], odds: float | None) -> str:
    """A promise as a line of a log.

    :param odds: with which the deadline is kept; None where there is none.
    """
    if promise.get("seconds") is None:
        return f"Nothing is promised of the end: {promise['why']}"
    due = "" if odds is None else f"; the deadline is kept with odds of {odds:.0%}"
    return (
        f"Done in {promise['seconds']:.0f} s with odds of {promise['confidence']:.0%} (as likely as not in "
        f"{promise['median']:.0f} s), by {promise['errors']} jobs of {promise['sweeps']} earlier sweeps{due}"
    )


def odds_of(ends: PlanEnds | None, seconds: float | None) -> float | None:
    """The odds of an end within ``seconds``; None where there is no such time, or nothing is known."""
    return None if ends is None or seconds is None else ends.sweep.odds(seconds)


def errors_of(sweep: str, outcomes: Sequence[Outcome], entries: Mapping[str, PlanEntry]) -> list[PastError]:
    """How far the estimates were off of jobs that trained from start to end in one run.

    :param entries: of the first plan, by job.
    """
    ended = {o.job: o.held.ended_at for o in outcomes if o.held is not None}
    found = []
    for o in outcomes:
        entry = entries.get(o.job)
        # That a job would end early no plan knew.
        if entry is None or o.planned is None or o.held is None or not o.in_one_go or o.reason:
            continue
        expected = _expected(entry, o.planned.technique, o.planned.devices)
        if expected and o.held.actual_seconds > 0:
            factor = o.held.actual_seconds / expected
            gap = max(0.0, o.held.started_at - _free_at(entry, ended))
            found.append(PastError(sweep, o.job, factor, o.planned.node, gap))
    return found


def asked_in(
    outcomes: Sequence[Outcome], entries: Mapping[str, PlanEntry], planned: float = 0.0
) -> float | None:
    """Seconds from a plan until its first jobs had devices, in the median; None where nobody tells.

    :param entries: of the first plan, by job. Who was to wait for another job, or sweep, tells nothing.
    :param planned: what the plan counted for that.
    """
    found = []
    for o in outcomes:
        entry = entries.get(o.job)
        if entry is not None and o.held is not None and o.in_one_go and entry.start <= planned + _AT_ONCE:
            found.append(max(0.0, o.held.started_at - entry.attempt))
    return statistics.median(found) if found else None


def _expected(entry: PlanEntry, technique: str, devices: int) -> float | None:
    """The seconds that were expected under this strategy."""
    if (technique, devices) == (entry.technique, entry.devices):
        return entry.planned_seconds
    return next(
        (s.seconds for s in entry.strategies if (s.technique, s.devices) == (technique, devices)), None
    )


def _free_at(entry: PlanEntry, ended: Mapping[str, float]) -> float:
    """When the job's devices were free for it: at the latest when its plan said so."""
    before = [ended[job] for job in entry.after if job in ended]
    return max(entry.attempt, *before) if before else entry.attempt + entry.start


def became(promise: Mapping[str, Any], made: float, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What became of a promise.

    :param made: when, in seconds since the epoch.
    :returns: the promise of the sweep, with ``kept``; None where a job did not end as it was to, so that
        nothing can be said.
    """
    found = {key: value for key, value in promise.items() if key != "jobs"}
    if promise.get("seconds") is None:
        return found
    ended = all(o.status in (Status.FINISHED, Status.PRUNED) for o in outcomes)
    took = max((o.held.ended_at for o in outcomes if o.held), default=made) - made
    return {**found, "took": took, "kept": took <= promise["seconds"] if ended else None}
