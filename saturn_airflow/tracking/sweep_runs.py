"""What MLflow knows of earlier sweeps: their runs, read back."""

from __future__ import annotations

import contextlib
import functools
import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saturn_airflow.model import json_text
from saturn_airflow.model.errors import SaturnError
from saturn_airflow.model.metrics import PART
from saturn_airflow.model.status import Status
from saturn_airflow.tracking import server
from saturn_airflow.tracking.mlflow_runs import SUPERSEDED_TAG
from saturn_airflow.tracking.parameters import METRICS_TAG
from saturn_airflow.tracking.server import RunGoneError

if TYPE_CHECKING:
    from mlflow.entities import Run

log = logging.getLogger(__name__)

_SWEEP_TAG = "saturn.sweep"
_FIGURES = (
    "planned_seconds",
    "promised_seconds",
    "promised_odds",
    "lower_bound_seconds",
    "gap",
    "actual_seconds",
    "utilisation",
    "device_hours",
)
_JOB_FIGURES = (
    "planned_seconds",
    "actual_seconds",
    "device_hours",
    "step",
    "loss",
    "epoch_loss",
    "eval_loss",
)
#: What earlier versions called figures, by their present names.
_CALLED_BEFORE = {"device_hours": "gpu_hours"}
_REPORT = "report.json"
# Runs or experiments of one answer.
_PAGE = 1000
#: MLflow's words where Saturn's own tag is not there yet.
_STATUSES = {
    "RUNNING": "running",
    "FINISHED": Status.FINISHED,
    "FAILED": Status.FAILED,
    "KILLED": Status.STOPPED,
}


def recent(uri: str, limit: int = 20, dag_id: str | None = None) -> list[dict[str, Any]]:
    """The latest sweeps, the last to start first.

    :param dag_id: only those of this DAG.
    :returns: JSON-ready: ``run_id``, ``sweep`` (``dag/run/task``), ``status``, ``started_at``, ``ended_at``
        (seconds since the epoch), ``jobs`` (how many), ``planned_seconds`` and other figures,
        ``devices``, ``best``, ``airflow_url``, ``url``; None for what is not known.
    :raises MlflowAwayError: when MLflow does not answer.
    """
    return [_sweep(uri, run) for run in _sweep_runs(uri, limit, dag_id)]


def one(uri: str, which: str) -> dict[str, Any]:
    """A sweep and its jobs.

    :param which: its MLflow run id, its key (``dag/run/task``), or a DAG's id for that DAG's latest.
    :returns: as in :func:`recent`, with a list of mappings as ``jobs``: ``job``, ``status``, ``reason``,
        ``technique``, ``devices``, ``node``, seconds, losses, ``metrics`` (its own), ``run_id``, ``url``.
        Jobs that never trained have no run; what became of them is known once the sweep has reported.
    :raises SaturnError: when there is no such sweep.
    :raises MlflowAwayError: when MLflow does not answer.
    """
    run = _find(uri, which)
    search = functools.partial(
        server.client(uri).search_runs,
        [run.info.experiment_id],
        f"tags.`mlflow.parentRunId` = '{run.info.run_id}'",
        order_by=["attributes.start_time ASC"],
        max_results=_PAGE,
    )
    with server.translated_errors():
        children = server.all_pages(lambda token: search(page_token=token))
    jobs = [_job(uri, child) for child in children if _counts(child)]
    trained = {job["job"] for job in jobs}
    jobs += [_untrained(told) for told in _reported(uri, run) if told["job"] not in trained]
    return {**_sweep(uri, run), "jobs": jobs}


def _reported(uri: str, run: Run) -> list[dict[str, Any]]:
    """The outcomes of a sweep's jobs in its report; none before there is one."""
    client, run_id = server.client(uri), run.info.run_id
    with server.translated_errors(), tempfile.TemporaryDirectory() as folder:
        if all(file.path != _REPORT for file in client.list_artifacts(run_id)):
            return []
        text = Path(client.download_artifacts(run_id, _REPORT, folder)).read_bytes()
    return _outcomes_in(text, run_id)


def _outcomes_in(report: bytes, run_id: str) -> list[dict[str, Any]]:
    with contextlib.suppress(ValueError, TypeError, KeyError):
        jobs = json_text.parse(report)["jobs"] or []
        return [{"job": str(job["job"]), "status": str(job["status"]), **job} for job in jobs]
    log.warning("the report of run %s is damaged, and left out", run_id)
    return []


def _untrained(told: Mapping[str, Any]) -> dict[str, Any]:
    """A job that has no run, as :func:`_job` shows those that have one."""
    unknown = ("run_id", "started_at", "ended_at", "url", "technique", "devices", "node", *_JOB_FIGURES)
    return {
        **dict.fromkeys(unknown),
        "job": told["job"],
        "status": told["status"],
        "reason": told.get("reason"),
        "metrics": {},
    }


def tagged(uri: str, tag: str, limit: int, dag_id: str | None = None) -> list[tuple[str, str]]:
    """The names of the latest sweeps that have a tag, each with what it says.

    :raises MlflowAwayError: when MLflow does not answer.
    """
    runs = _sweep_runs(uri, limit, dag_id)
    return [(run.data.tags[_SWEEP_TAG], run.data.tags[tag]) for run in runs if tag in run.data.tags]


def _counts(run: Run) -> bool:
    """Whether no later training of the same job stands in for this one."""
    return SUPERSEDED_TAG not in run.data.tags


def _find(uri: str, which: str) -> Run:
    if "/" in which:
        found = _sweep_runs(uri, 1, sweep=which)
    else:
        found = _sweep_runs(uri, 1, which) or _by_id(uri, which)
    if not found:
        raise SaturnError(
            f"MLflow knows no sweep {which!r}; `saturn sweeps` lists them. Give a run id, a sweep's name as "
            "it stands there, or a DAG's id"
        )
    return found[0]


def _by_id(uri: str, run_id: str) -> list[Run]:
    try:
        with server.translated_errors():
            run = server.client(uri).get_run(run_id)
    except (RunGoneError, server.RecordRefusedError):
        return []
    return [run] if _SWEEP_TAG in run.data.tags else []


def _sweep_runs(uri: str, limit: int, dag_id: str | None = None, sweep: str = "") -> list[Run]:
    """The latest runs of sweeps, the last to start first; of a DAG, or of the sweep with this name."""
    quote = '"' if "'" in sweep else "'"
    wanted = f"tags.`{_SWEEP_TAG}` {'=' if sweep else '!='} {quote}{sweep}{quote}"
    if dag_id is not None:
        wanted += " AND tags.`airflow.dag_id` = '{}'".format(dag_id.replace("'", ""))
    client = server.client(uri)
    with server.translated_errors():
        experiments = [
            experiment.experiment_id
            for experiment in server.all_pages(
                lambda token: client.search_experiments(max_results=_PAGE, page_token=token)
            )
        ]
        order = ["attributes.start_time DESC"]
        return list(client.search_runs(experiments, wanted, order_by=order, max_results=limit))


def _sweep(uri: str, run: Run) -> dict[str, Any]:
    tags = run.data.tags
    best: dict[str, Any] = {
        key: tags.get(f"saturn.best.{key}") for key in ("job", "metric", "value", "model_uri")
    }
    with contextlib.suppress(ValueError):
        best["value"] = best["value"] and float(best["value"])
    return {
        **_common(uri, run),
        "sweep": tags[_SWEEP_TAG],
        "jobs": _whole(run.data.params.get("jobs")) or 0,
        "devices": _whole(run.data.params.get("devices")) or 0,
        **_numbers(run.data.metrics, _FIGURES),
        "best": best if best["job"] else None,
        "airflow_url": tags.get("airflow.url"),
    }


def _job(uri: str, run: Run) -> dict[str, Any]:
    # The present strategy is in the tags where it is another than at first.
    strategy: dict[str, Any] = {
        key: run.data.tags.get(key, run.data.params.get(key)) for key in ("technique", "devices", "node")
    }
    own: list[str] = []
    with contextlib.suppress(ValueError):  # whoever writes to MLflow may have changed it
        own = list(map(str, json_text.parse(run.data.tags.get(METRICS_TAG, "[]") or "[]") or ()))
    strategy["devices"] = _whole(strategy["devices"])
    return {
        "job": run.info.run_name,
        **_common(uri, run),
        "reason": run.data.tags.get("saturn.reason"),
        **strategy,
        **_numbers(run.data.metrics, _JOB_FIGURES),
        "metrics": {name: v for name, v in run.data.metrics.items() if name.partition(PART)[0] in own},
    }


def _whole(text: str | None) -> int | None:
    """A count as MLflow keeps it; None where it is none."""
    with contextlib.suppress(ValueError, TypeError):
        return int(text)  # type: ignore[arg-type]
    return None


def _common(uri: str, run: Run) -> dict[str, Any]:
    return {
        "run_id": run.info.run_id,
        "status": run.data.tags.get("saturn.status") or _STATUSES.get(run.info.status, run.info.status),
        "started_at": run.info.start_time / 1000,
        "ended_at": run.info.end_time / 1000 if run.info.end_time else None,
        "url": server.run_url(uri, run.info.experiment_id, run.info.run_id),
    }


def _numbers(metrics: Mapping[str, float], names: tuple[str, ...]) -> dict[str, float | None]:
    return {name: metrics.get(name, metrics.get(_CALLED_BEFORE.get(name, name))) for name in names}
