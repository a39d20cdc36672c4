"""The champion of a registered model, fetched to be scored again."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

from saturn_airflow.model import json_text
from saturn_airflow.model.initial_weights import WEIGHTS
from saturn_airflow.tracking import models, server
from saturn_airflow.tracking.server import RecordRefusedError, RunGoneError

log = logging.getLogger(__name__)

_JOB = "job.json"


def fetch(uri: str, name: str, folder: Path) -> dict[str, Any] | None:
    """The champion of the registered model ``name``; its weights are in ``folder`` then.

    :returns: ``version``, ``run_id``, ``job`` (that trained it, as data; None where no sweep did)
        and ``weights`` (the file); None where there is no champion.
    :raises MlflowAwayError: when MLflow does not answer.
    """
    client = server.client(uri)
    with server.translated_errors():
        champion = models.version_of(client, name, models.CHAMPION)
        if champion is None:
            return None
        version = str(champion.version)
        place = client.get_model_version_download_uri(name, version)
    found = {"version": version, "run_id": champion.run_id, "job": None, "weights": ""}
    kept = folder / version
    if not kept.exists() and not _download(uri, place, kept):
        return found
    try:
        job = json_text.parse((kept / _JOB).read_text())
    except (OSError, ValueError) as error:
        log.warning("%s of version %s of %s is damaged: %s", _JOB, version, name, error)
        return found
    return {**found, "job": job, "weights": str(kept / WEIGHTS)}


def _download(uri: str, place: str, to: Path) -> bool:
    from mlflow import artifacts

    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetching-", dir=to.parent) as folder:
        try:
            with server.translated_errors(), server.uploading():
                listed = artifacts.list_artifacts(artifact_uri=place, tracking_uri=uri)
                if not {WEIGHTS, _JOB} <= {Path(file.path).name for file in listed}:
                    return False
                for name in (WEIGHTS, _JOB):
                    artifacts.download_artifacts(f"{place}/{name}", dst_path=folder, tracking_uri=uri)
        except (RunGoneError, RecordRefusedError):
            return False
        Path(folder).rename(to)
        Path(folder).mkdir()  # which its context removes
    return True
