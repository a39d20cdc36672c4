"""What a job's ``init_from`` means in MLflow: which version, and its weights as a file."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

from saturn_airflow.model import disks, json_text
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.initial_weights import WEIGHTS, Source, parse
from saturn_airflow.tracking import models, server
from saturn_airflow.tracking.server import RecordRefusedError, RunGoneError

# Bytes; the safetensors library refuses longer ones as well.
_LONGEST_HEADER = 100_000_000


def pin(uri: str, init_from: str) -> str | None:
    """``init_from`` with the version that is meant now: ``models:/digits@champion`` is ``models:/digits/3``.

    A file gets its digest. What is pinned stays as it is.

    :returns: None where there is no such model, alias, version, run or file (yet).
    :raises InvalidSweepError: for what names nothing that weights could come from, and for a file of another
        format: nothing is copied of what is no weights.
    :raises MlflowAwayError: when MLflow does not answer.
    """
    source = parse(init_from)
    if source.name is not None:
        version = _version(uri, source)
        return None if version is None else f"models:/{source.name}/{version.version}"
    if source.run is not None:
        client = server.client(uri)
        try:
            with server.translated_errors():
                client.get_run(source.run)
        except (RunGoneError, RecordRefusedError):
            return None
        return f"runs:/{source.run}/{source.path}"
    file = _weights_file(Path(source.path))
    if file is None:
        return None
    _check_format(file)
    return f"{source.path}#sha256={_digest(file)}"


def fetch(uri: str, pinned: str, to: Path) -> None:
    """Write the weights that ``pinned`` means to the file ``to``; it is whole or not there.

    :raises InvalidSweepError: when there are none of the kind that can be read.
    :raises MlflowAwayError: when MLflow does not answer.
    """
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetching-", dir=to.parent) as folder:
        source = parse(pinned)
        if source.run is None and source.name is None:
            found = _weights_file(Path(source.path))
            fetched = None if found is None else Path(shutil.copyfile(found, Path(folder, WEIGHTS)))
            # Of the copy: the file may be written anew while it is copied.
            if fetched is None or _digest(fetched) != source.digest:
                raise InvalidSweepError(f"init_from: {source.path} has changed since {pinned} was noted")
        else:
            fetched = _download(uri, pinned, source, folder)
        disks.sync(fetched)
        fetched.rename(to)


def _download(uri: str, pinned: str, source: Source, folder: str) -> Path:
    client = server.client(uri)
    from mlflow import artifacts

    place = f"runs:/{source.run}/{source.path}"
    if source.run is None:
        with server.translated_errors():
            place = client.get_model_version_download_uri(str(source.name), str(source.version))
    try:
        with server.translated_errors(), server.uploading():
            found = artifacts.download_artifacts(f"{place}/{WEIGHTS}", dst_path=folder, tracking_uri=uri)
    except server.TrackingError as error:
        if _has_weights(uri, place) is False:
            raise InvalidSweepError(
                f"init_from: {pinned} holds no {WEIGHTS}; it must be a model that a sweep has trained, or "
                "one with its weights in such a file"
            ) from None
        if isinstance(error, server.MlflowAwayError):
            raise
        raise InvalidSweepError(f"init_from: {pinned} can't be fetched: {error}") from error
    _check_format(Path(found))
    return Path(found)


def _has_weights(uri: str, place: str) -> bool | None:
    """Whether a model's folder has the file; None where that can't be told."""
    from mlflow import artifacts

    try:
        with server.translated_errors():
            found = artifacts.list_artifacts(artifact_uri=place, tracking_uri=uri)
    except server.TrackingError:
        return None
    return any(Path(file.path).name == WEIGHTS for file in found)


def _version(uri: str, source: Source) -> Any:
    client, name = server.client(uri), str(source.name)
    try:
        with server.translated_errors():
            if source.alias is not None:
                return models.version_of(client, name, source.alias)
            if source.version != "latest":
                return client.get_model_version(name, str(source.version))
            found = client.search_model_versions(f"name = '{name}'")
            return max(found, key=lambda version: int(version.version), default=None)
    except RunGoneError:
        return None


def _weights_file(path: Path) -> Path | None:
    path = path / WEIGHTS if path.is_dir() else path
    return path if path.is_file() else None


def _check_format(path: Path) -> None:
    """See that a file begins as safetensors do: https://huggingface.co/docs/safetensors, "Format".

    The library is not asked, since it comes with torch, which whoever plans can do without.
    """
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length <= _LONGEST_HEADER and isinstance(json_text.parse(file.read(length)), dict):
                return
    except ValueError:
        pass
    except OSError as error:
        raise InvalidSweepError(f"init_from: {path} can't be read: {error.strerror}") from None
    raise InvalidSweepError(
        f"init_from: {path} is not in the safetensors format; write the weights with "
        "safetensors.torch.save_file(model.state_dict(), ...)"
    )


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()[:16]
