"""Estimates kept in MLflow, so that tomorrow's plan is made from what was measured and trained today.

One run per (fingerprint, technique, number of devices, kind of device). Each observation is a tag of its
own name, so two sweeps that write at once lose nothing; the run's metrics show the latest, for people.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saturn_airflow.estimates import Estimate
from saturn_airflow.tracking import parameters, server, unique
from saturn_airflow.tracking.outbox import Outbox, Record
from saturn_airflow.tracking.runs import send_patiently
from saturn_airflow.tracking.sender import Sender
from saturn_airflow.tracking.server import RecordRefusedError, RunGoneError, TrackingError

if TYPE_CHECKING:
    from mlflow.entities import Run

log = logging.getLogger(__name__)

EXPERIMENT = "saturn-estimates"
#: Raise it when what an observation holds changes its meaning: others are ignored with a note.
FORMAT = 1
#: Observations of one estimate that are kept; older ones make room.
KEPT = 10
#: Days after which an observation counts half.
HALF_LIFE_DAYS = 14.0

_OBSERVATION_TAG = "saturn.observation."
_FINGERPRINT_TAG = "saturn.fingerprint"
_METRICS = (
    "seconds_per_batch",
    "setup_seconds",
    "spread",
    "batches",
    "batches_per_epoch",
    "peak_device_bytes",
    "peak_host_bytes",
)


def record(
    uri: str,
    estimates: Iterable[Estimate],
    folder: str | Path,
    versions: Mapping[str, str] | None = None,
    patience: float = 5.0,
) -> bool:
    """Keep measured estimates.

    :param folder: of the sweep; keeps what MLflow has not taken yet.
    :param versions: of what can change the speed (torch, the technique); :func:`find` asks for the same.
    :param patience: seconds to try for while MLflow does not answer.
    :returns: whether MLflow has everything.
    """
    return _keep(uri, estimates, "measured", folder, versions, patience)


def update(
    uri: str,
    estimates: Iterable[Estimate],
    folder: str | Path,
    versions: Mapping[str, str] | None = None,
    patience: float = 5.0,
) -> bool:
    """Keep the speeds that training really had; ``batches`` says how many batches each was seen over."""
    return _keep(uri, estimates, "trained", folder, versions, patience)


def find(uri: str, fingerprints: Iterable[str], versions: Mapping[str, str] | None = None) -> list[Estimate]:
    """What is known of jobs with these fingerprints; each estimate's source is ``"history"``.

    Seconds are means over the observations under the latest parameters, weighted by their batches and,
    halving every 14 days, by their age. Records of another format or other ``versions`` are left out with
    a note in the log, and so is everything when MLflow does not answer.
    """
    found: list[Estimate] = []
    try:
        experiment = server.experiment_id(uri, EXPERIMENT)
        for fingerprint in dict.fromkeys(fingerprints):
            for run in _runs_of(uri, experiment, fingerprint):
                estimate = _combined(_observations(run, versions or {}))
                if estimate is not None:
                    found.append(estimate)
    except TrackingError as error:
        log.warning("MLflow does not answer (%s): no estimates from earlier sweeps", error)
        return []
    return found


def send(uri: str, record: Record) -> None:
    """Write one ``estimate`` record; writing it again changes nothing.

    :raises MlflowAwayError: when MLflow does not answer.
    """
    from mlflow.entities import Metric, RunTag

    observation = record["observation"]
    estimate = Estimate.from_dict(observation["estimate"])
    mlflow = server.client(uri)
    run = unique.find_or_create(
        uri,
        server.experiment_id(uri, EXPERIMENT),
        "\n".join((estimate.fingerprint, estimate.technique, str(estimate.devices), estimate.kind)),
        ("fingerprint", estimate.fingerprint),
        f"{record['name']} {estimate.technique} x{estimate.devices} {estimate.kind}",
        {_FINGERPRINT_TAG: estimate.fingerprint},
        observation["time"],
    )
    run_id = run.info.run_id
    metrics = {} if estimate.reason else {name: getattr(estimate, name) for name in _METRICS}
    tags = {
        "reason": estimate.reason or "",
        "source": observation["source"],
        "parameters": json.dumps(dict(estimate.parameters), sort_keys=True),
        **{f"version.{key}": value for key, value in observation["versions"].items()},
    }
    with server.answers():
        for key in ("technique", "devices", "kind"):
            mlflow.log_param(run_id, key, str(getattr(estimate, key)), synchronous=True)
        mlflow.log_batch(
            run_id,
            metrics=[Metric(key, value, observation["time"], 0) for key, value in metrics.items()],
            tags=[
                RunTag(_OBSERVATION_TAG + record["id"], json.dumps(observation)),
                *(RunTag(key, value) for key, value in parameters.tags(tags).items()),
            ],
            synchronous=True,
        )
        if run.info.status == "RUNNING":
            mlflow.set_terminated(run_id, "FINISHED", observation["time"])
    _make_room(uri, run)


def _keep(
    uri: str,
    estimates: Iterable[Estimate],
    source: str,
    folder: str | Path,
    versions: Mapping[str, str] | None,
    patience: float,
) -> bool:
    outbox = Outbox(folder)
    now = round(1000 * time.time())
    for estimate in estimates:
        if estimate.source == "measured":
            observation = {
                "format": FORMAT,
                "source": source,
                "time": now,
                "versions": dict(versions or {}),
                "estimate": estimate.to_dict(),
            }
            outbox.append(
                {
                    "kind": "estimate",
                    "id": _id(folder, source, estimate),
                    "name": estimate.fingerprint[:8],
                    "observation": observation,
                }
            )
    outbox.sync()
    return send_patiently(Sender(uri, outbox), patience)


def _id(folder: str | Path, source: str, estimate: Estimate) -> str:
    """The same for a task's retry, another for another sweep."""
    facts = json.dumps([str(Path(folder).absolute()), source, estimate.to_dict()], sort_keys=True)
    return hashlib.sha256(facts.encode()).hexdigest()[:12]


def _runs_of(uri: str, experiment: str, fingerprint: str) -> list[Run]:
    with server.answers():
        return list(
            server.client(uri).search_runs(
                [experiment], f"tags.`{_FINGERPRINT_TAG}` = '{fingerprint}'", max_results=5000
            )
        )


def _observations(run: Run, versions: Mapping[str, str]) -> list[dict[str, Any]]:
    """A run's observations that can be used, the oldest first."""
    usable = []
    for key, value in run.data.tags.items():
        if not key.startswith(_OBSERVATION_TAG):
            continue
        try:
            observation = json.loads(value)
            if observation["format"] != FORMAT:
                log.info("%s: an estimate in format %s is ignored", run.info.run_name, observation["format"])
            elif observation["versions"] != dict(versions):
                log.info("%s: an estimate under %s is ignored", run.info.run_name, observation["versions"])
            else:
                observation["estimate"] = Estimate.from_dict(observation["estimate"])
                usable.append(observation)
        except (ValueError, KeyError, TypeError) as error:
            log.info("%s: an estimate that can't be read is ignored (%s)", run.info.run_name, error)
    return sorted(usable, key=lambda observation: float(observation["time"]))


def _combined(observations: Sequence[Mapping[str, Any]]) -> Estimate | None:
    if not observations:
        return None
    latest: Estimate = observations[-1]["estimate"]
    if latest.reason is not None:
        return _replaced(latest)
    alike = [
        (o["estimate"], 0.5 ** ((observations[-1]["time"] - o["time"]) / 1000 / 86400 / HALF_LIFE_DAYS))
        for o in observations
        if o["estimate"].reason is None and o["estimate"].parameters == latest.parameters
    ]
    return _replaced(
        latest,
        seconds_per_batch=_mean((e.seconds_per_batch, w * max(1, e.batches)) for e, w in alike),
        setup_seconds=_mean((e.setup_seconds, w) for e, w in alike),
        batches=sum(e.batches for e, _ in alike),
        peak_device_bytes=max(e.peak_device_bytes for e, _ in alike),
        peak_host_bytes=max(e.peak_host_bytes for e, _ in alike),
    )


def _replaced(estimate: Estimate, **changes: Any) -> Estimate:
    return Estimate.from_dict({**estimate.to_dict(), **changes, "source": "history"})


def _mean(weighted: Iterable[tuple[float, float]]) -> float:
    pairs = list(weighted)
    return sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs)


def _make_room(uri: str, run: Run) -> None:
    """Forget the oldest observations beyond those that are kept."""
    mlflow = server.client(uri)
    with server.answers():
        tags = mlflow.get_run(run.info.run_id).data.tags
    keys = [key for key in tags if key.startswith(_OBSERVATION_TAG)]
    for key in sorted(keys, key=lambda key: _time_of(tags[key]))[:-KEPT]:
        try:
            with server.answers():
                mlflow.delete_tag(run.info.run_id, key)
        except (RecordRefusedError, RunGoneError):
            pass  # another sweep was quicker


def _time_of(observation: str) -> float:
    try:
        return float(json.loads(observation)["time"])
    except (ValueError, KeyError, TypeError):
        return 0.0
