"""Estimates kept in MLflow, so that tomorrow's plan is made from what was measured and trained today.

One run per (fingerprint, technique, number of devices, kind of device), so that MLflow's own UI compares
them. Each observation is a tag of its own name, so two sweeps that write at once lose nothing; the run's
metrics show the latest, for people.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import statistics
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from saturn_airflow.model import guards
from saturn_airflow.model.estimates import Estimate, Key
from saturn_airflow.tracking import server
from saturn_airflow.tracking.estimate_observations import (
    EXPERIMENT,
    FINGERPRINT_TAG,
    FORMAT,
    OBSERVATION_TAG,
    Observation,
    read,
)
from saturn_airflow.tracking.outbox import Outbox, now
from saturn_airflow.tracking.sender import Sender
from saturn_airflow.tracking.sending import send_patiently
from saturn_airflow.tracking.server import TrackingError

if TYPE_CHECKING:
    from mlflow.entities import Run

log = logging.getLogger(__name__)

#: Days after which an observation counts half.
HALF_LIFE_DAYS = 14.0
#: Days after which what could not run is tried again: a driver, a model or a node may have changed since.
REASON_DAYS = 7.0


@dataclass(frozen=True)
class KnownEstimate:
    """An estimate, and where it comes from.

    :param job: the name of a job that it was last seen of; jobs alike share it.
    :param source: ``"measured"`` in a trial, or ``"trained"``: seen in training since.
    :param versions: under which it was seen.
    """

    job: str
    estimate: Estimate
    source: str
    versions: Mapping[str, str]


def keep(
    estimates: Iterable[Estimate],
    folder: str | Path,
    versions: Mapping[str, str] | None = None,
    jobs: Mapping[str, str] | None = None,
    source: Literal["measured", "trained"] = "measured",
) -> Outbox:
    """Keep estimates that trials have measured, or the speeds that training really had, to be sent.

    Whose speed was far from what was expected is ``stale``: it is found so until a later one is as expected.

    :param estimates: where they are of training, ``batches`` says how many each was seen over.
    :param folder: of the sweep; keeps what MLflow has not taken yet.
    :param versions: of what can change the speed, such as torch; :func:`find` asks for the same.
    :param jobs: names of jobs by fingerprint, for people.
    :returns: what they are sent from, with what else waits there.
    """
    outbox = Outbox(folder)
    observed = now()
    for estimate in estimates:
        if estimate.source == "measured":
            job = (jobs or {}).get(estimate.fingerprint, "")
            observation = {
                "format": FORMAT,
                "source": source,
                "time": observed,
                "job": job,
                "versions": dict(versions or {}),
                "estimate": estimate.to_dict(),
            }
            outbox.append(
                {
                    "kind": "estimate",
                    "id": _id(folder, source, estimate),
                    "name": f"{job} {estimate.fingerprint[:8]}".strip(),
                    "observation": observation,
                }
            )
    outbox.sync()
    return outbox


def record(
    uri: str,
    estimates: Iterable[Estimate],
    folder: str | Path,
    versions: Mapping[str, str] | None = None,
    patience: float = 5.0,
    jobs: Mapping[str, str] | None = None,
    source: Literal["measured", "trained"] = "measured",
) -> bool:
    """Keep estimates (:func:`keep`), and send them.

    :param patience: seconds to try for while MLflow does not answer.
    :returns: whether MLflow has everything.
    """
    return send_patiently(Sender(uri, keep(estimates, folder, versions, jobs, source)), patience)


def find(
    uri: str,
    fingerprints: Iterable[str],
    versions: Mapping[str, str] | None = None,
    folders: Iterable[str | Path] = (),
) -> list[Estimate]:
    """What is known of jobs with these fingerprints; each estimate's source is ``"history"``.

    Seconds are means over the observations under the latest parameters, weighted by their batches and,
    halving every 14 days, by their age. What could not run counts for a week. Records of another format or
    other ``versions`` are left out with a note in the log, and so is everything when MLflow does not answer.

    :param folders: of sweeps that have records which MLflow has not taken; those are looked at, too.
    """
    wanted = list(dict.fromkeys(fingerprints))
    observations: dict[Key, list[Observation]] = {}
    for seen in _unsent(folders, wanted, versions or {}):
        observations.setdefault(seen["estimate"].key, []).append(seen)
    try:
        experiment = server.experiment_id(uri, EXPERIMENT)
        for fingerprint in wanted:
            for run in _runs(uri, experiment, f"tags.`{FINGERPRINT_TAG}` = '{fingerprint}'"):
                for seen in _observations(run, versions or {}):
                    observations.setdefault(seen["estimate"].key, []).append(seen)
    except TrackingError as error:
        log.warning("MLflow does not answer (%s): no estimates from earlier sweeps", error)
    combined = {key: e for key, seen in observations.items() if (e := _combined(seen)) is not None}
    return _as_training_had_it(combined, observations)


def everything(uri: str) -> list[KnownEstimate]:
    """All estimates there are, each under the versions it was seen under last.

    :raises TrackingError: when MLflow does not answer.
    """
    found = []
    for run in _runs(uri, server.experiment_id(uri, EXPERIMENT), ""):
        if not (seen := _observations(run, None)):
            continue
        last = seen[-1]
        alike = [o for o in seen if o["versions"] == last["versions"]]
        estimate = _combined(alike, forgetful=False)
        assert estimate is not None
        found.append(KnownEstimate(last.get("job", ""), estimate, last["source"], last["versions"]))
    return found


def _id(folder: str | Path, source: str, estimate: Estimate) -> str:
    """The same for a task's retry, another for another sweep."""
    facts = json.dumps([str(Path(folder).absolute()), source, estimate.to_dict()], sort_keys=True)
    return hashlib.sha256(facts.encode()).hexdigest()[:12]


def _runs(uri: str, experiment: str, where: str) -> list[Run]:
    search = functools.partial(server.client(uri).search_runs, [experiment], where, max_results=1000)
    with server.translated_errors():
        return server.all_pages(lambda token: search(page_token=token))


def _observations(run: Run, versions: Mapping[str, str] | None) -> list[Observation]:
    """A run's observations that can be used, the oldest first.

    :param versions: under which they must have been seen; None for any.
    """
    texts = [value for key, value in run.data.tags.items() if key.startswith(OBSERVATION_TAG)]
    found = [seen for text in texts if (seen := read(text, versions, run.info.run_name or "")) is not None]
    return sorted(found, key=lambda seen: float(seen["time"]))


def _unsent(
    folders: Iterable[str | Path], fingerprints: Collection[str], versions: Mapping[str, str]
) -> Iterator[Observation]:
    """Observations that MLflow has not taken yet."""
    for folder in folders:
        outbox = Outbox(folder)
        offset = outbox.state().get("offset", 0)
        while records := outbox.read(offset):
            offset = records[-1][1]
            for record, _ in records:
                if record.get("kind") != "estimate":
                    continue
                seen = read(json.dumps(record.get("observation")), versions, str(record.get("name")))
                if seen is not None and seen["estimate"].fingerprint in fingerprints:
                    yield seen


def _combined(observations: Sequence[Observation], forgetful: bool = True) -> Estimate | None:
    """What observations of one strategy say together; None where all they say is too old.

    :param forgetful: whether what could not run is forgotten after a while.
    """
    if not observations:
        return None
    # What is of tomorrow was told by a clock that was wrong, and may be of any time.
    tomorrow = 1000 * (time.time() + 86400)
    observations = [seen if seen["time"] <= tomorrow else {**seen, "time": 0.0} for seen in observations]
    ordered = sorted(observations, key=lambda seen: float(seen["time"]))
    # What a technique of another version did says nothing of this one.
    ordered = [seen for seen in ordered if seen["estimate"].version == ordered[-1]["estimate"].version]
    latest: Estimate = ordered[-1]["estimate"]
    latest = _replaced(latest, verdicts=_verdicts(ordered, forgetful))
    at = float(ordered[-1]["time"]) / 1000
    if latest.reason is not None:
        return None if forgetful and _is_too_old(at) else _replaced(latest, observed_at=at)
    alike = [
        (o["estimate"], 0.5 ** ((at - o["time"] / 1000) / 86400 / HALF_LIFE_DAYS))
        for o in ordered
        if o["estimate"].works and o["estimate"].parameters == latest.parameters
    ]
    # What has seen no batch has only met the guard.
    alike = [(e, w) for e, w in alike if e.batches] or alike
    # Not each observation shows how launching without being warm goes, nor how training ends.
    launches = [(e.launch_seconds, w) for e, w in alike if e.launch_seconds > 0]
    endings = [(e.ending_seconds, w) for e, w in alike if e.ending_seconds > 0]
    return _replaced(
        latest,
        seconds_per_batch=_mean((e.seconds_per_batch, w * max(1, e.batches)) for e, w in alike),
        launch_seconds=_mean(launches),
        setup_seconds=_mean((e.setup_seconds, w) for e, w in alike),
        evaluation_seconds=_mean((e.evaluation_seconds, w) for e, w in alike),
        ending_seconds=_mean(endings),
        batches=sum(e.batches for e, _ in alike),
        peak_device_bytes=max(e.peak_device_bytes for e, _ in alike),
        peak_host_bytes=max(e.peak_host_bytes for e, _ in alike),
        observed_at=at,
    )


def _is_too_old(at: float) -> bool:
    """Whether what could not run then is tried again."""
    return time.time() - at > REASON_DAYS * 86400


def _verdicts(observations: Iterable[Observation], forgetful: bool) -> dict[str, str]:
    """What the guard said last of the parameters that were chosen last, the oldest observation first."""
    verdicts: dict[str, str] = {}
    parameters: Mapping[str, Any] | None = None
    for e, at in ((o["estimate"], float(o["time"]) / 1000) for o in observations):
        if e.works and e.parameters != parameters:
            verdicts, parameters = {}, e.parameters
        verdicts.update(e.verdicts)
        if forgetful and _is_too_old(at):
            verdicts = {mark: v for mark, v in verdicts.items() if not v.startswith(guards.RAN_OUT)}
    return verdicts


def _as_training_had_it(
    combined: Mapping[Key, Estimate], observations: Mapping[Key, Sequence[Observation]]
) -> list[Estimate]:
    """What is known, with strategies that were only tried as much slower as training made those it used.

    Training has neighbours on the machine and lasts until it is warm. Without this a plan would leave what
    training was honest about for what only a short trial has seen.
    """
    seen: dict[tuple[str, str], list[float]] = {}
    for key, own in observations.items():
        tried, trained = ([o for o in own if o["source"] == source] for source in ("measured", "trained"))
        before, now = _combined(tried), combined.get(key)
        if trained and before is not None and now is not None and before.works and now.works:
            if not before.seconds_per_batch:  # it has only met the guard
                continue
            ratio = now.seconds_per_batch / before.seconds_per_batch
            seen.setdefault((key.fingerprint, key.kind), []).append(ratio)
    found = []
    for key, estimate in combined.items():
        ratios = seen.get((key.fingerprint, key.kind))
        only_tried = all(o["source"] == "measured" for o in observations[key])
        if estimate.works and only_tried and ratios:
            seconds = estimate.seconds_per_batch * statistics.median(ratios)
            estimate = _replaced(estimate, seconds_per_batch=seconds)
        found.append(estimate)
    return found


def _replaced(estimate: Estimate, **changes: Any) -> Estimate:
    return Estimate.from_dict({**estimate.to_dict(), **changes, "source": "history"})


def _mean(weighted: Iterable[tuple[float, float]]) -> float:
    pairs = list(weighted)
    if not pairs:
        return 0.0
    # What is ages old counts nothing, unless there is nothing else.
    whole = sum(weight for _, weight in pairs) or None
    return sum(value * (weight if whole else 1) for value, weight in pairs) / (whole or len(pairs))
