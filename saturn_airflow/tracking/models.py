"""Trained models in MLflow: the model of a job's run, and the best of a sweep in the registry."""

from __future__ import annotations

import logging
import math
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.tracking import server, unique
from saturn_airflow.tracking.server import MlflowAwayError, RecordRefusedError, RunGoneError

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.models import ModelSignature

log = logging.getLogger(__name__)

#: The alias of the version that others are measured against.
CHAMPION = "champion"
#: Where a job's model lies among its run's artifacts.
FOLDER = "model"
#: Makes a model of the folder again, for ``mlflow.pyfunc.load_model``.
_LOADER = "saturn_airflow.training.pyfunc"
_METRIC_TAG, _VALUE_TAG = "saturn.metric", "saturn.value"


def parse_name(register_as: object) -> tuple[str, str]:
    """The registered model and the alias that ``"name"`` or ``"name@alias"`` means.

    :raises InvalidSweepError: when it means none.
    """
    text = register_as if isinstance(register_as, str) else ""
    name, at, alias = text.partition("@")
    alias = alias if at else CHAMPION
    if not name.strip() or re.search(r"[/:\\]", name) or not name.isprintable():
        raise InvalidSweepError(
            f"register_as is {register_as!r}; give the name of a registered model, such as 'digits', without "
            "/ and :, or 'digits@challenger' for another alias than champion"
        )
    # https://mlflow.org/docs/latest/ml/model-registry/: what an alias may be
    if not re.fullmatch(r"[\w-]{1,255}", alias, re.ASCII) or re.fullmatch(r"latest|v\d+", alias.lower()):
        raise InvalidSweepError(
            f"register_as is {register_as!r}; an alias is of letters, digits, - and _, and neither "
            "'latest' nor like 'v3'"
        )
    return name, alias


def log_model(uri: str, run_id: str, path: Path, to: str, inputs: Sequence[Mapping[str, Any]]) -> None:
    """Log a job's exported model, with what MLflow needs to load it: the file ``MLmodel``.

    :param inputs: what the model is called with: ``name``, ``dtype`` and ``shape``; the model's signature.
    """
    from mlflow import pyfunc
    from mlflow.models import Model

    client = server.client(uri)
    model = Model(artifact_path=to, run_id=run_id, signature=_signature(inputs))
    pyfunc.add_to_model(model, loader_module=_LOADER)
    with server.answers(), server.uploading(), tempfile.TemporaryDirectory() as folder:
        described = Path(folder, "MLmodel")
        model.save(str(described))
        client.log_artifacts(run_id, str(path), to)
        client.log_artifact(run_id, str(described), to)


def _signature(inputs: Sequence[Mapping[str, Any]]) -> ModelSignature | None:
    import numpy as np
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    try:
        specs: list[Any] = [TensorSpec(np.dtype(i["dtype"]), tuple(i["shape"]), i["name"]) for i in inputs]
    except TypeError:  # a type that numpy lacks, such as bfloat16
        return None
    return ModelSignature(inputs=Schema(specs)) if specs else None


def register(uri: str, experiment_id: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """Register a job's model under an alias if it beats the champion; otherwise leave all as it is.

    The champion's value is the metric of the run it came from. Two sweeps that register under one name at the
    same moment may both beat the champion; the alias is then that of the later.

    :param record: ``name``, ``alias``, ``sweep`` (its key), ``job``, ``metric``, ``value``, ``mode``.
    :returns: ``name``, ``alias``, ``version`` (None where nothing was registered), ``champion`` (the version
        it was measured against, and its value), ``reason``.
    :raises MlflowAwayError: when MLflow does not answer or does not have the model yet.
    :raises RecordRefusedError: when it will never have it.
    """
    client = server.client(uri)
    name, job = record["name"], record["job"]
    with server.answers():
        run_id = _trained_run(uri, client, experiment_id, record)
        champion = version_of(client, name, CHAMPION)
        mine = _registered_before(client, name, run_id)
        found: dict[str, Any] = {"name": name, "alias": record["alias"], "version": None, "champion": None}
        if champion is not None and champion.run_id != run_id:
            value = _value_of(client, champion, record["metric"])
            found["champion"] = {"version": str(champion.version), "value": value}
            if reason := _why_not(record, champion, value):
                return {**found, "reason": reason}
        if mine is None:
            if _get_model(client, name) is None:
                client.create_registered_model(name)
            source = f"runs:/{run_id}/{FOLDER}"
            tags = {_METRIC_TAG: record["metric"], _VALUE_TAG: repr(record["value"]), "saturn.job": job}
            mine = client.create_model_version(name, source, run_id, tags=tags)
        client.set_registered_model_alias(name, record["alias"], mine.version)
    beaten = f", which beats version {champion.version}" if found["champion"] and champion else ""
    reason = f"{job}: {record['metric']} {record['value']:.6g}{beaten}"
    return {**found, "version": str(mine.version), "reason": reason}


def _trained_run(uri: str, client: MlflowClient, experiment_id: str, record: Mapping[str, Any]) -> str:
    job = record["job"]
    run = unique.find(uri, experiment_id, f"{record['sweep']}\n{job}", ("job", job))
    if run is None:
        raise MlflowAwayError(f"the run of {job!r} has not arrived yet")
    run_id = str(run.info.run_id)
    if not client.list_artifacts(run_id, FOLDER):
        if run.info.status == "RUNNING":
            raise MlflowAwayError(f"the model of {job!r} has not arrived yet")
        raise RecordRefusedError(f"the run of {job!r} ended without a model")
    return run_id


def _why_not(record: Mapping[str, Any], champion: ModelVersion, value: float | None) -> str | None:
    who = f"version {champion.version} ({CHAMPION})"
    if value is None:
        return f"{who} has no {record['metric']} to be measured against"
    better = record["value"] < value if record["mode"] == "min" else record["value"] > value
    if better or math.isnan(value):
        return None
    return (
        f"{record['job']} has {record['metric']} {record['value']:.6g} and does not beat {who}: {value:.6g}"
    )


def _value_of(client: MlflowClient, version: ModelVersion, metric: str) -> float | None:
    """A version's metric: its run's, or, when that is gone, what was noted when it was registered."""
    try:
        with server.answers():
            value = client.get_run(version.run_id).data.metrics.get(metric) if version.run_id else None
    except RunGoneError:
        value = None
    if value is None and version.tags.get(_METRIC_TAG) == metric:
        value = float(version.tags[_VALUE_TAG])
    return None if value is None else float(value)


def version_of(client: MlflowClient, name: str, alias: str) -> ModelVersion | None:
    """The version of a registered model that an alias names; None where there is none."""
    model = _get_model(client, name)
    number = model.aliases.get(alias) if model is not None else None
    return client.get_model_version(name, number) if number is not None else None


def _registered_before(client: MlflowClient, name: str, run_id: str) -> ModelVersion | None:
    """The version this very run has already, as when a report is run again."""
    versions = client.search_model_versions(f"run_id = '{run_id}'")
    return next((version for version in versions if version.name == name), None)


def _get_model(client: MlflowClient, name: str) -> Any:
    try:
        with server.answers():
            return client.get_registered_model(name)
    except RunGoneError:  # there is none
        return None
