"""One observation of an estimate as MLflow keeps it: written once, read back, the oldest making room."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from saturn_airflow.model import json_text
from saturn_airflow.model.errors import SaturnError
from saturn_airflow.model.estimates import Estimate
from saturn_airflow.tracking import parameters, server, unique
from saturn_airflow.tracking.outbox import Record
from saturn_airflow.tracking.server import RecordRefusedError, RunGoneError

if TYPE_CHECKING:
    from mlflow.entities import Run

log = logging.getLogger(__name__)

Observation = dict[str, Any]

EXPERIMENT = "saturn-estimates"
#: Raise it when what an observation holds changes its meaning: others are ignored with a note.
FORMAT = 2
#: Observations of one estimate that are kept; older ones make room.
KEPT = 10

OBSERVATION_TAG = "saturn.observation."
FINGERPRINT_TAG = "saturn.fingerprint"
_METRICS = (
    "seconds_per_batch",
    "spread",
    "launch_seconds",
    "setup_seconds",
    "evaluation_seconds",
    "ending_seconds",
    "batches",
    "batches_per_epoch",
    "peak_device_bytes",
    "peak_host_bytes",
)


def send(uri: str, record: Record) -> None:
    """Write one ``estimate`` record; writing it again changes nothing.

    :raises MlflowAwayError: when MLflow does not answer.
    """
    from mlflow.entities import Metric, Param, RunTag

    observation = record["observation"]
    estimate = Estimate.from_dict(observation["estimate"])
    mlflow = server.client(uri)
    run = unique.find_or_create(
        uri,
        server.experiment_id(uri, EXPERIMENT),
        "\n".join((estimate.fingerprint, estimate.technique, str(estimate.devices), estimate.kind)),
        ("fingerprint", estimate.fingerprint),
        f"{record['name']} {estimate.technique} x{estimate.devices} {estimate.kind}",
        {FINGERPRINT_TAG: estimate.fingerprint},
        observation["time"],
    )
    run_id = run.info.run_id
    metrics = {} if estimate.reason else {name: getattr(estimate, name) for name in _METRICS}
    tags = {
        "job": observation.get("job"),
        "reason": estimate.reason or "",
        "stale": estimate.stale or "",
        "source": observation["source"],
        "observed": _date(observation["time"]),
        "parameters": json.dumps(dict(estimate.parameters), sort_keys=True),
        "version.technique": estimate.version,
        **{f"version.{key}": value for key, value in observation["versions"].items()},
    }
    with server.translated_errors():
        mlflow.log_batch(
            run_id,
            params=[Param(key, str(getattr(estimate, key))) for key in ("technique", "devices", "kind")],
            metrics=[Metric(key, value, observation["time"], 0) for key, value in metrics.items()],
            tags=[
                RunTag(OBSERVATION_TAG + record["id"], json.dumps(observation)),
                *(RunTag(key, value) for key, value in parameters.tags(tags).items()),
            ],
            synchronous=True,
        )
        if run.info.status == "RUNNING":
            mlflow.set_terminated(run_id, "FINISHED", observation["time"])
    _make_room(uri, run)


def read(text: str, versions: Mapping[str, str] | None, name: str) -> Observation | None:
    """An observation with its estimate; None, with a note, where it can't be used."""
    try:
        seen: Observation = json_text.parse(text)
        if seen["format"] != FORMAT:
            log.info("%s: an estimate in format %s is ignored", name, seen["format"])
        elif versions is not None and seen["versions"] != dict(versions):
            log.info("%s: an estimate under %s is ignored", name, seen["versions"])
        else:
            estimate = Estimate.from_dict(seen["estimate"])
            estimate.check()
            told = {"job": str(seen.get("job", "")), "source": str(seen["source"])}
            return {**seen, **told, "time": _finite(seen["time"]), "estimate": estimate}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, SaturnError) as error:
        log.info("%s: an estimate that can't be read is ignored (%s)", name, error)
    return None


def _finite(number: Any) -> float:
    if not math.isfinite(found := float(number)):
        raise ValueError(f"{number!r} is no time")
    return found


def _make_room(uri: str, run: Run) -> None:
    """Forget the oldest observations beyond those that are kept.

    :param run: as it was before the last of them.
    """
    if sum(key.startswith(OBSERVATION_TAG) for key in run.data.tags) < KEPT:
        return
    mlflow = server.client(uri)
    with server.translated_errors():
        tags = mlflow.get_run(run.info.run_id).data.tags
    keys = [key for key in tags if key.startswith(OBSERVATION_TAG)]
    for key in sorted(keys, key=lambda key: _time_of(tags[key]))[:-KEPT]:
        try:
            with server.translated_errors():
                mlflow.delete_tag(run.info.run_id, key)
        except (RecordRefusedError, RunGoneError):
            pass  # another sweep was quicker


def _date(milliseconds: float) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, timezone.utc).isoformat(" ", "minutes")


def _time_of(observation: str) -> float:
    try:
        return float(json_text.parse(observation)["time"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return 0.0
