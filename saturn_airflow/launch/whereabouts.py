"""Where a job is now, without reading all that its runs said: training of days says millions of things."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from saturn_airflow.launch import event_file
from saturn_airflow.launch.event_file import Event
from saturn_airflow.launch.followed_run import Run, all_of
from saturn_airflow.model.plan import Place
from saturn_airflow.model.sharing import Pace, seconds_to_leave
from saturn_airflow.model.status import Status


@dataclass(frozen=True)
class Whereabouts:
    """Where a job is.

    :param share: of its batches, what has been trained.
    :param status: how its last run ended; None while it is alive, and where there is none.
    :param given_up: whether nobody goes on from its last run by itself: it has failed for good.
    :param place: where it trains; None while it does not.
    :param since: when it got its devices there, in seconds since the epoch.
    :param leaves_in: seconds that it takes to write its checkpoint and leave; None where it has written none.
    :param pace: how fast it trains there, from its first step there on; None until its second.
    """

    share: float = 0.0
    status: str | None = None
    given_up: bool = False
    place: Place | None = None
    since: float = 0.0
    leaves_in: float | None = None
    pace: Pace | None = None


def of(folder: str | Path) -> Whereabouts:
    """Where the job is whose state is in ``folder`` (:attr:`RunSpec.folder`)."""
    found = Whereabouts()
    for run in all_of(folder):
        end = run.end
        share = max(found.share, 1.0 if end and end["status"] == Status.FINISHED else _share(run))
        given_up = end is not None and run.is_given_up()
        found = Whereabouts(share, end["status"] if end else None, given_up)
        if end is None and (leased := event_file.last(run.folder, "leased")) is not None:
            place = _place(run, leased)
            left = event_file.last(run.folder, "gave_way")
            if left is None or event_file.seconds_between(left, leased) > 0:
                since, pace = float(leased["time"]), _pace(run, leased)
                found = replace(found, place=place, since=since, leaves_in=_leaves_in(run), pace=pace)
    return found


def _share(run: Run) -> float:
    began, step = event_file.last(run.folder, "start"), event_file.last(run.folder, "step")
    if began is None or not began.get("total_batches"):
        return 0.0
    steps = max(began.get("step") or 0, step["step"] if step else 0)
    return min(1.0, float(steps / began["total_batches"]))


def _pace(run: Run, leased: Event) -> Pace | None:
    began, last = event_file.last(run.folder, "start"), event_file.last(run.folder, "step")
    # What comes before the first step of all counts as setting up.
    first = event_file.first_since(run.folder, "start", "step")
    if began is None or first is None or last is None or event_file.seconds_between(leased, began) < 0:
        return None
    steps, total = last["step"] - first["step"], began.get("total_batches")
    if steps <= 0 or not total:
        return None
    seconds = event_file.seconds_between(first, last)
    return Pace(steps / total, seconds, last.get("epoch", 0) > first.get("epoch", 0))


def _leaves_in(run: Run) -> float | None:
    left = event_file.last(run.folder, "gave_way")
    if left and left.get("seconds") is not None:  # earlier versions did not say
        return float(left["seconds"])
    saved, step = event_file.last(run.folder, "checkpoint"), event_file.last(run.folder, "step")
    return None if saved is None else seconds_to_leave(saved["seconds"], step["seconds"] if step else 0.0)


def _place(run: Run, leased: Event) -> Place:
    spec, devices = run.spec, tuple(leased.get("devices", ()))
    if "technique" not in leased:  # of an earlier version, where all ran as planned
        return Place(spec.technique, spec.devices, spec.node, devices)
    return Place(leased["technique"], len(devices), spec.node, devices)
