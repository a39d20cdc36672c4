"""Ending runs of sweeps and jobs that nobody else will end, and going on where somebody does after all."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saturn_airflow.model.status import Status
from saturn_airflow.tracking import parameters, server
from saturn_airflow.tracking.events import STATUSES
from saturn_airflow.tracking.mlflow_runs import SWEEP_TAG
from saturn_airflow.tracking.opening_runs import reopen_sweep
from saturn_airflow.tracking.outbox import Outbox
from saturn_airflow.tracking.sender import Sender
from saturn_airflow.tracking.sending import send_patiently

_STOPPED = Status.STOPPED


@dataclass(frozen=True)
class RunningSweep:
    """A sweep that has not ended in MLflow.

    :param name: its DAG, its DAG run, its task group.
    :param mlflow_run: the id of its run in MLflow.
    """

    name: tuple[str, str, str]
    mlflow_run: str


def running_sweeps(uri: str, experiment: str, dag_id: str) -> list[RunningSweep]:
    """The sweeps of a DAG that have not ended in MLflow, the last to start first.

    :param experiment: only those that are there; all of MLflow may be much.
    :raises MlflowAwayError: when MLflow does not answer.
    """
    wanted = f"tags.`{SWEEP_TAG}` != '' AND attributes.status = 'RUNNING'"
    with server.translated_errors():
        client = server.client(uri)
        there = client.get_experiment_by_name(experiment)
        if there is None:
            return []
        order = ["attributes.start_time DESC"]
        search = functools.partial(client.search_runs, [there.experiment_id], wanted, order_by=order)
        runs = server.all_pages(lambda token: search(page_token=token))
    found = []
    for run in runs:
        key, run_id = run.data.tags[SWEEP_TAG], run.data.tags.get("airflow.run_id", "")
        # A DAG run's id may have any characters, and so has none of its own to split a key at.
        start = f"{dag_id}/{run_id}/"
        if run_id and key.startswith(start):
            found.append(RunningSweep((dag_id, run_id, key.removeprefix(start)), run.info.run_id))
    return found


def stop_sweep(uri: str, mlflow_run: str, reason: str, folder: str | Path) -> None:
    """End the run of a sweep, and those of its jobs that have not ended, as stopped.

    :param folder: of the sweep, where :func:`go_on` finds that it was stopped.
    :raises TrackingError: when MLflow does not answer, or refuses.
    """
    tags = {"saturn.status": _STOPPED, "saturn.reason": reason}
    with server.translated_errors():
        client = server.client(uri)
        own = client.get_run(mlflow_run)
        wanted = f"tags.`mlflow.parentRunId` = '{mlflow_run}' AND attributes.status = 'RUNNING'"
        search = functools.partial(client.search_runs, [own.info.experiment_id], wanted)
        jobs = server.all_pages(lambda token: search(page_token=token))
        for run in (*jobs, own):
            for tag, value in tags.items():
                client.set_tag(run.info.run_id, tag, value, synchronous=True)
            client.set_terminated(run.info.run_id, STATUSES[_STOPPED])
    outbox = Outbox(folder)
    if outbox.size():
        end = {"kind": "end", "status": STATUSES[_STOPPED], "tags": tags, "time": outbox.moment()}
        outbox.append(end)
        send_patiently(Sender(uri, outbox), patience=1.0)


def go_on(uri: str, sweep: Mapping[str, Any], folder: str | Path, patience: float) -> None:
    """Let the run of a sweep go on that was stopped; any other is left as it is.

    :param sweep: as ``SweepRun.to_dict`` describes it.
    :param folder: of the sweep.
    :param patience: seconds to try for while MLflow does not answer.
    """
    outbox = Outbox(folder)
    end, began = outbox.last("end", None) or {}, outbox.last("run", sweep["name"]) or {}
    if end.get("status") == STATUSES[_STOPPED] and end["time"] >= began.get("time", 0):
        reopen_sweep(uri, {**sweep, "time": outbox.moment()}, folder, patience)


def end_left_open(job: str, folder: str | Path, status: str, reason: str | None) -> None:
    """End the run of a job that its task has left open, since another try was to go on with it and none will;
    to be sent.

    :param folder: of the job.
    :param status: what became of it.
    """
    outbox = Outbox(folder)
    end, began = outbox.last("end", None), outbox.last("run", job) or {}
    if outbox.size() and (end is None or end["time"] < began.get("time", -1)):
        known = status if status in STATUSES else Status.FAILED
        tags = parameters.tags({"saturn.status": known, "saturn.reason": reason})
        outbox.append({"kind": "end", "status": STATUSES[known], "tags": tags, "time": outbox.moment()})
