"""What sweeps may have left behind: training that nobody follows, checkpoints nobody told of, records."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from pathlib import Path

from saturn_airflow.launch import rights
from saturn_airflow.model.outcomes import Outcome
from saturn_airflow.model.status import Status
from saturn_airflow.operators.context import SweepContext, home

log = logging.getLogger(__name__)

#: For how long one sweep sends what others have left, all in all and of each.
_SENDING_SECONDS, _SECONDS_OF_EACH = 10.0, 1.0
#: For how long others' folders that do not answer hold up a sweep, all in all.
PATIENCE_SECONDS = 5.0


def readable(sweep: SweepContext, jobs: Iterable[str]) -> set[str]:
    """Those of ``jobs`` whose folders this user may read; of each of the others the log says why not."""
    found = set(jobs)
    for job in sorted(found):
        folder = sweep.job_folder(job)
        try:
            for place in (folder, folder / "runs", folder / "mlflow"):
                with contextlib.suppress(FileNotFoundError):
                    os.scandir(place).close()
        except PermissionError as error:
            why = rights.why_not(folder / "runs") or str(error)
            log.warning("%s is reported without what lies in its folder: %s", job, why)
            found.remove(job)
    return found


def stop_leftovers(
    sweep: SweepContext, jobs: Iterable[str], log: Callable[[str], object] = lambda line: None
) -> None:
    """Tell training of these jobs to stop, on whatever node; the tasks that followed it are all gone.

    Training on a node that can't be reached now hears of it once the sweep's folder is there again.
    """
    from saturn_airflow.launch import runs

    for job in jobs:
        run = runs.attach(sweep.job_folder(job))
        if run is not None:
            log(f"{job} still trains in {run.folder}, and no task follows it any more: it is stopped")
            run.stop()


def with_last_checkpoints(
    sweep: SweepContext, outcomes: Iterable[Outcome], among: Collection[str]
) -> list[Outcome]:
    """``outcomes``, with the last checkpoint and its step where a job of ``among`` did not finish."""
    from saturn_airflow.launch import past_runs

    found = []
    for outcome in outcomes:
        if outcome.status != Status.FINISHED and not outcome.checkpoint and outcome.job in among:
            saved = past_runs.last_checkpoint(sweep.job_folder(outcome.job))
            if saved is not None:
                reason = f"{outcome.reason or 'it was lost'}. Saved at step {saved['step']}"
                outcome = replace(outcome, checkpoint=saved["path"], steps=saved["step"], reason=reason)
        found.append(outcome)
    return found


def send_unsent(uri: str) -> list[Path]:
    """Send MLflow what it has not taken of any sweep, such as of one that ended while it was away.

    :param uri: MLflow's.
    :returns: the folders of sweeps with something that was to be sent.
    """
    from saturn_airflow import tracking
    from saturn_airflow.launch import read_apart

    deadline = time.monotonic() + _SENDING_SECONDS
    folders = sorted((home() / "sweeps").glob("*/*/*"))
    unsent = list(read_apart.those(folders, tracking.has_unsent, PATIENCE_SECONDS))
    for folder in unsent:
        # Those of a sweep that goes on are being sent by its own tasks; others wait behind it.
        if time.monotonic() < deadline:
            tracking.send_outbox(uri, folder, patience=_SECONDS_OF_EACH)
    return unsent
