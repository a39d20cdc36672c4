"""Opening the runs of sweeps and jobs: created where they do not exist, else the ones that there are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from saturn_airflow.model import formats
from saturn_airflow.tracking import parameters, unique
from saturn_airflow.tracking.mlflow_runs import SWEEP_TAG, JobRun, SweepRun
from saturn_airflow.tracking.outbox import Outbox


def open_sweep(
    uri: str,
    experiment: str,
    name: str,
    tags: Mapping[str, Any],
    params: Mapping[str, Any],
    folder: str | Path,
    patience: float = 5.0,
) -> SweepRun:
    """The run of a sweep, created where it does not exist; retries and later tasks get the same one.

    :param tags: must hold ``saturn.sweep``, which no other sweep has, such as ``dag/run/task``.
    :param params: nested mappings are flattened.
    :param folder: of the sweep; keeps what MLflow has not taken yet.
    :param patience: seconds to try for while MLflow does not answer.
    """
    key = tags[SWEEP_TAG]
    description = _description(experiment, key, ("sweep", key), name, tags, params, folder)
    run = SweepRun(uri, folder, description, patience)
    run.flush()
    return run


def reopen_sweep(
    uri: str, sweep: Mapping[str, Any], folder: str | Path, patience: float = 5.0, *, send: bool = True
) -> SweepRun:
    """The run that :meth:`SweepRun.to_dict` described.

    :param send: whether to send what waits now, or with what is logged later.
    """
    run = SweepRun(uri, folder, _identity(sweep), patience)
    if send:
        run.flush()
    return run


def open_job(
    uri: str,
    sweep: SweepRun | Mapping[str, Any],
    name: str,
    params: Mapping[str, Any],
    tags: Mapping[str, Any],
    folder: str | Path,
    training: int = 1,
) -> JobRun:
    """The run of a job, below its sweep's, created where it does not exist.

    Returns at once: MLflow is talked to in the background, and need not be there.

    :param sweep: the sweep's run, or its ``to_dict()``.
    :param name: the job's; unique within the sweep.
    :param params: nested mappings are flattened; see :func:`~saturn_airflow.tracking.job_params`.
    :param folder: of the job; keeps what MLflow has not taken yet.
    :param training: which of the job's trainings, from 1: one that starts anew has a run of its own.
    """
    told = sweep.to_dict() if isinstance(sweep, SweepRun) else sweep
    parent, above = _identity(told), told.get("run_id")
    key = unique.key_of_job(parent["key"], name, training)
    description = _description(parent["experiment"], key, ("job", name), name, tags, params, folder)
    datasets = parameters.datasets(params)
    return JobRun(uri, folder, {**description, "datasets": datasets, "parent": parent, "above": above})


def reopen_job(uri: str, folder: str | Path) -> JobRun | None:
    """The run that the records in a job's folder are of, as :func:`open_job` left it; None where none are."""
    first = next((record for record, _ in Outbox(folder).read(0) if record.get("kind") == "run"), None)
    return None if first is None else JobRun(uri, folder, first, said=True)


def _description(
    experiment: str,
    key: str,
    claim: tuple[str, str],
    name: str,
    tags: Mapping[str, Any],
    params: Mapping[str, Any],
    folder: str | Path,
) -> dict[str, Any]:
    return {
        "kind": "run",
        "experiment": experiment,
        "key": key,
        "claim": list(claim),
        "name": name,
        "tags": parameters.tags({"saturn.status": "running", **_shown_by_mlflow(tags), **tags}),
        "params": parameters.flat(params),
        "time": Outbox(folder).moment(),
    }


def _shown_by_mlflow(tags: Mapping[str, Any]) -> dict[str, Any]:
    """What MLflow's UI shows as a run's source and description."""
    shown = {"mlflow.source.type": "JOB", "mlflow.source.name": tags.get("airflow.dag_id", "saturn")}
    if url := tags.get("airflow.url"):
        shown["mlflow.note.content"] = f"[DAG run in Airflow]({url})"
    return shown


def _identity(sweep: Mapping[str, Any]) -> dict[str, Any]:
    own = ("run_id", "url", formats.FORMAT, formats.WRITTEN_BY)
    return {key: value for key, value in sweep.items() if key not in own}
