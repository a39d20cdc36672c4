"""Settling, once for a sweep, which weights its jobs start from."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from saturn_airflow.model import initial_weights, json_text
from saturn_airflow.model.disks import write_whole
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.jobs import Job

# Beside the weights: what each ``init_from`` meant when it was asked first; None where there was nothing.
_SETTLED = "settled.json"


def settled(
    jobs: Sequence[Job], uri: Callable[[], str], folder: Path, log: Callable[[str], object]
) -> list[Job]:
    """The jobs with the versions that their ``init_from`` means; their weights are in ``folder`` then.

    What was settled before for this folder is kept: whoever clears a sweep gets the versions it began with.

    :param uri: of MLflow, asked for where it is needed.
    :param folder: of the sweep.
    :raises InvalidSweepError: when there are no such weights, and the job does not start from scratch then.
    :raises saturn_airflow.tracking.server.MlflowAwayError: when MLflow does not answer.
    """
    if all(job.init_from is None for job in jobs):
        return list(jobs)
    notes = folder / initial_weights.FOLDER / _SETTLED
    notes.parent.mkdir(parents=True, exist_ok=True)
    versions = known(notes) if notes.exists() else {}
    found: list[Job] = []
    for job in jobs:
        if job.init_from is None:
            found.append(job)
            continue
        if job.init_from not in versions:
            try:
                pinned = _fetched(uri(), job.init_from, folder)
            except InvalidSweepError as error:
                raise InvalidSweepError(f"job {job.name!r}: {error}") from None
            if pinned is None and job.init_missing == initial_weights.FAIL:
                raise InvalidSweepError(
                    f"job {job.name!r}: init_from is {job.init_from!r}, and there is no such model (yet); "
                    "with init_missing='scratch' the job starts without it then"
                )
            log(f"init_from {job.init_from}: {pinned or 'nothing there yet; from scratch'}")
            versions[job.init_from] = pinned
            _note(notes, versions)
        found.append(dataclasses.replace(job, init_from=versions[job.init_from]))
    return found


def known(notes: Path) -> dict[str, str | None]:
    """The versions that were settled, by what the jobs say.

    :raises InvalidSweepError: when the file is damaged.
    """
    try:
        versions = json_text.parse(notes.read_text())
        if isinstance(versions, dict) and all(isinstance(v, str | None) for v in versions.values()):
            return versions
    except ValueError:
        pass
    raise InvalidSweepError(
        f"{notes} is damaged: it said with which versions of models this sweep began. "
        "Remove it to begin with the present ones, and clear the sweep"
    )


def _fetched(uri: str, init_from: str, folder: Path) -> str | None:
    from saturn_airflow.tracking import init_from as in_mlflow

    pinned = in_mlflow.pin(uri, init_from)
    if pinned is not None and not (file := Path(initial_weights.file_of(folder, pinned))).exists():
        in_mlflow.fetch(uri, pinned, file)
    return pinned


def _note(notes: Path, known: dict[str, str | None]) -> None:
    write_whole(notes, json.dumps(known, indent=1))
