"""What a job's runs came to so far: how often they failed, how long they had devices, what they saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from saturn_airflow.launch import event_file
from saturn_airflow.launch.event_file import Event
from saturn_airflow.launch.followed_run import Run, all_of
from saturn_airflow.model.refusals import RefusedStrategy
from saturn_airflow.model.status import Status

#: How long a GPU may fail before that counts against the jobs that meet it.
_GPU_MENDED_SECONDS = 1800.0


def has_asked(folder: str | Path, since: float) -> bool:
    """Whether a job has a run that holds its devices, waits for them, or has ended, under this plan; or has
    finished under an earlier one, and needs none.

    :param folder: the state of the job in its sweep, :attr:`RunSpec.folder`.
    :param since: when the plan was made, in seconds since the epoch.
    """
    return any(
        run.spec.priority[0] >= since or (end := run.end) is None or end["status"] == Status.FINISHED
        for run in all_of(folder)
    )


def failures(folder: str | Path, counts: Callable[[Run], bool] = Run.exists, node: str | None = None) -> int:
    """How many runs of a job ended badly: not finished, and not because they were told to stop.

    One that was lost and had written a checkpoint does not count: its node went, and the job got on. Neither
    does what was the node's own fault, such as a full disk, nor what a GPU's hardware or driver did in the
    first half hour of it: drivers are reset in seconds, and tries would be used up by then.

    :param counts: whether a run is to be counted.
    :param node: where the job is now; what was lost elsewhere went with its node, and does not count.
    """
    count = 0
    gpu_failed_at: float | None = None
    for run in all_of(folder):
        end = run.end
        if end is None or end["status"] in (Status.FINISHED, Status.STOPPED) or end.get("whose") == "node":
            continue
        if end.get("whose") != "device" or run.has_saved():
            gpu_failed_at = None
        elif (gpu_failed_at := gpu_failed_at or end["time"]) > end["time"] - _GPU_MENDED_SECONDS:
            continue
        lost = end["status"] == Status.LOST and (run.has_saved() or node not in (None, run.spec.node))
        count += not lost and counts(run)
    return count


def time_on_devices(folder: str | Path, counts: Callable[[Run], bool] = Run.exists) -> dict[str, float]:
    """When a job had its devices, over all its runs so far.

    :param folder: the state of the job in its sweep, :attr:`RunSpec.folder`.
    :param counts: whether a run is to be counted.
    :returns: ``started_at`` and ``ended_at`` (seconds since the epoch), ``actual_seconds`` (held in all) and
        ``before_seconds`` (of them, until ranks were launched for the last time); empty where it had none.
    """
    started, ended, held, before = [], [], 0.0, 0.0
    for run in filter(counts, all_of(folder)):
        events, since = run.so_far(), None
        for event in events:
            if event["event"] == "leased" and since is None:
                since = event
                started.append(event_file.moment(since, events[-1]))
                continue
            if since is not None and event["event"] == "launched":
                before = held + event_file.seconds_between(since, event)
            if since is not None and (event["event"] == "gave_way" or event is events[-1]):
                ended.append(event_file.moment(event, events[-1]))
                held += event_file.seconds_between(since, event)
                since = None
        if since is not None:
            ended.append(event_file.moment(since, events[-1]))
    if not started:
        return {}
    # A clock that was set back between two runs would have the first end last, or begin after the end.
    moments = {"started_at": min(started[0], ended[-1] - held), "ended_at": ended[-1]}
    return {**moments, "actual_seconds": held, "before_seconds": before}


def result_of(folder: str | Path, end: Event) -> dict[str, Any]:
    """What a job's training said at its ``end``, and all its runs besides.

    That is, as ``mixed``, why its result may be that of no one code, or no one data; and as ``refusals`` the
    strategies that the guard refused meanwhile.

    :param folder: the state of the job in its sweep, :attr:`RunSpec.folder`.
    """
    found, every = dict(end.get("result") or {}), all_of(folder)
    warnings = [w for run in every for w in event_file.every(run.folder, "warning")]
    if why := dict.fromkeys(warning["message"] for warning in warnings if warning.get("mixed")):
        found["mixed"] = "; ".join(why)
    if refusals := refusals_of(every):
        found["refusals"] = [refusal.to_dict() for refusal in refusals]
    return found


def refusals_of(every: Iterable[Run]) -> list[RefusedStrategy]:
    """The strategies that runs were refused, the last refusal of each."""
    events = [event for run in every for event in event_file.every(run.folder, "refused")]
    found = map(RefusedStrategy.from_dict, events)
    return list({(refusal.technique, refusal.devices): refusal for refusal in found}.values())


def steps_by_itself(folder: str | Path, technique: str) -> int:
    """After how many batches a technique that trains by itself, and so has no checkpoints of Saturn's, left
    off when it was last stopped; 0 where it was not.

    :param folder: the state of the job in its sweep, :attr:`RunSpec.folder`.
    """
    for run in reversed(all_of(folder)):
        end = run.end
        if end is not None and end["status"] == Status.STOPPED and run.spec.technique == technique:
            return int(end["result"].get("steps", 0))
    return 0


def last_checkpoint(folder: str | Path) -> Event | None:
    """The ``checkpoint`` event (``step``, ``path``) of the last checkpoint that a job wrote; of those that a
    refused strategy wrote, which are set aside, of the last that is still there.

    :param folder: the state of the job in its sweep, :attr:`RunSpec.folder`.
    """
    refused = False
    for run in reversed(all_of(folder)):
        kinds = ("checkpoint", "refused")
        events = [event for kind in kinds for event in event_file.every(run.folder, kind)]
        for event in sorted(events, key=event_file.order, reverse=True):
            refused = refused or event["event"] == "refused"
            if event["event"] == "checkpoint" and not (refused and not Path(event["path"]).exists()):
                return event
    return None
