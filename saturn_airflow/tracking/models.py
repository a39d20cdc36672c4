"""Trained models in MLflow: the model of a job's run, and the best of a sweep in the registry."""

from __future__ import annotations

import contextlib
import logging
import math
import platform
import re
import sys
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
# What makes a model of the folder again, for ``mlflow.pyfunc.load_model``: a module among the code that the
# model carries, or this package's, of models that were exported before they carried any.
_CODE, _LOADER, _LOADER_BEFORE = "code", "saturn_model", "saturn_airflow.training.pyfunc"
_REQUIREMENTS, _ENVIRONMENT = "requirements.txt", "python_env.yaml"
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
    with server.translated_errors(), server.uploading(), tempfile.TemporaryDirectory() as folder:
        if (path / _CODE).is_dir():
            pyfunc.add_to_model(model, loader_module=_LOADER, code=_CODE, python_env=_ENVIRONMENT)
            _describe_environment(path, Path(folder))
        else:
            pyfunc.add_to_model(model, loader_module=_LOADER_BEFORE)
        model.save(str(Path(folder, "MLmodel")))
        client.log_artifacts(run_id, str(path), to)
        client.log_artifacts(run_id, folder, to)


def _describe_environment(path: Path, folder: Path) -> None:
    """Write what MLflow makes an environment of, https://mlflow.org/docs/latest/ml/model/#model-dependencies."""
    import mlflow

    needed = (path / _REQUIREMENTS).read_text() if (path / _REQUIREMENTS).exists() else ""
    Path(folder, _REQUIREMENTS).write_text(f"mlflow=={mlflow.__version__}\n{needed}")
    environment = f"python: {platform.python_version()}\ndependencies:\n- -r {_REQUIREMENTS}\n"
    Path(folder, _ENVIRONMENT).write_text(environment)


def _signature(inputs: Sequence[Mapping[str, Any]]) -> ModelSignature | None:
    import numpy as np
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    try:
        specs: list[Any] = [TensorSpec(np.dtype(i["dtype"]), tuple(i["shape"]), i["name"]) for i in inputs]
    except TypeError:  # a type that numpy lacks, such as bfloat16
        return None
    return ModelSignature(inputs=Schema(specs)) if specs else None


def register(
    uri: str, experiment_id: str, record: Mapping[str, Any], lock: Path | None = None
) -> dict[str, Any]:
    """Register a job's model under an alias if it beats the champion; otherwise leave all as it is.

    The champion's value is the one it was scored with on the sweep's own data; where it was not to be scored,
    or became champion since, the metric of the run it came from. Who registers under one name at once does it
    in turn where they share a ``lock``; where they don't, a champion that changed meanwhile is measured, too.

    A champion whose value is NaN or infinite is beaten by every number.

    :param record: ``name``, ``alias``, ``sweep`` (its key), ``job``, ``training`` (which of the job's, from
        1), ``metric``, ``value``, ``mode``; and ``against``: the champion's ``version``, its ``value`` or
        ``why`` it could not be scored, and whether its score is ``no_number``.
    :param lock: a file.
    :returns: ``name``, ``alias``, ``version`` (None where nothing was registered), ``champion`` (the version
        it was measured against, its value, and whether it was ``scored`` anew), ``beaten_by``, ``reason``.
    :raises MlflowAwayError: when MLflow does not answer or does not have the model yet.
    :raises RecordRefusedError: when it will never have it.
    """
    client = server.client(uri)
    with server.translated_errors(), contextlib.ExitStack() as held:
        if lock is not None:
            lock.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(server.locked(lock))
        run_id = _trained_run(uri, client, experiment_id, record)
        made = None
        while True:
            champion = version_of(client, record["name"], CHAMPION)
            found, beats = _measured(client, record, champion, run_id)
            mine = _registered_before(client, record["name"], run_id)
            if not beats:
                if made is not None:  # before there was another champion
                    client.delete_model_version(record["name"], made.version)
                return found
            if mine is None:
                mine = made = _new_version(client, record, run_id, found)
            now = version_of(client, record["name"], CHAMPION)
            if (now and now.version) == (champion and champion.version):
                client.set_registered_model_alias(record["name"], record["alias"], mine.version)
                return {**found, "version": str(mine.version)}


def _measured(
    client: MlflowClient, record: Mapping[str, Any], champion: ModelVersion | None, run_id: str
) -> tuple[dict[str, Any], bool]:
    """What to say of the model beside the champion, and whether it beats it."""
    found = {"name": record["name"], "alias": record["alias"], "version": None, "champion": None}
    mine = f"{record['job']}: {record['metric']} {record['value']:.6g}"
    if champion is None or champion.run_id == run_id:
        return {**found, "reason": mine}, True
    who = f"version {champion.version} ({CHAMPION})"
    against = record.get("against") or {}
    # Of which version, if any, MLflow was away too early to say.
    same = against.get("version") in (None, str(champion.version))
    value, why = against.get("value") if same else None, against.get("why") if same else None
    value = math.nan if same and against.get("no_number") else value
    scored = value is not None
    if value is None and why is None:
        value = _value_of(client, champion, record["metric"])
        why = None if value is not None else f"it has no {record['metric']} to be measured against"
    is_number = value is not None and math.isfinite(value)
    found["champion"] = {
        "version": str(champion.version),
        "value": value if is_number else None,
        "scored": scored,
    }
    if value is None:
        return {**found, "reason": f"{who} stays: {why}"}, False
    data = "on the same data" if scored else "when it was trained, on the data of then"
    if not is_number:
        return {**found, "reason": f"{mine} beats {who}, which has {value} {data}"}, True
    by = value - record["value"] if record["mode"] == "min" else record["value"] - value
    found["beaten_by"] = by
    beats = by > 0
    verdict = f"beats {who} by {by:.4g}" if beats else f"does not beat {who}"
    return {**found, "reason": f"{mine} {verdict}: {value:.6g} {data}"}, beats


def _new_version(
    client: MlflowClient, record: Mapping[str, Any], run_id: str, found: Mapping[str, Any]
) -> ModelVersion:
    name, champion = record["name"], found["champion"] or {}
    if _get_model(client, name) is None:
        try:
            client.create_registered_model(name)
        except Exception as error:  # somebody else was first
            if getattr(error, "error_code", None) != "RESOURCE_ALREADY_EXISTS":
                raise
    tags = {_METRIC_TAG: record["metric"], _VALUE_TAG: repr(record["value"]), "saturn.job": record["job"]}
    if champion:
        tags |= {"saturn.champion": champion["version"], "saturn.champion_value": repr(champion["value"])}
    if "beaten_by" in found:
        tags["saturn.beaten_by"] = repr(found["beaten_by"])
    if came_from := client.get_run(run_id).data.params.get("init_from"):
        tags["saturn.init_from"] = came_from
    return client.create_model_version(name, f"runs:/{run_id}/{FOLDER}", run_id, tags=tags)


def _trained_run(uri: str, client: MlflowClient, experiment_id: str, record: Mapping[str, Any]) -> str:
    job = record["job"]
    key = unique.key_of_job(record["sweep"], job, record.get("training", 1))
    run = unique.find(uri, experiment_id, key, ("job", job))
    if run is None:
        raise MlflowAwayError(f"the run of {job!r} has not arrived yet")
    run_id = str(run.info.run_id)
    if not client.list_artifacts(run_id, FOLDER):
        if run.info.status == "RUNNING":
            raise MlflowAwayError(f"the model of {job!r} has not arrived yet")
        raise RecordRefusedError(f"the run of {job!r} ended without a model")
    return run_id


def _value_of(client: MlflowClient, version: ModelVersion, metric: str) -> float | None:
    """A version's metric: its run's, or, when that is gone, what was noted when it was registered."""
    try:
        with server.translated_errors():
            value = client.get_run(version.run_id).data.metrics.get(metric) if version.run_id else None
    except RunGoneError:
        value = None
    if value is None and version.tags.get(_METRIC_TAG) == metric:
        value = float(version.tags[_VALUE_TAG])
    if value is not None and abs(value) >= sys.float_info.max:
        return math.nan  # MLflow's stores have the largest number for infinity
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
        with server.translated_errors():
            return client.get_registered_model(name)
    except RunGoneError:  # there is none
        return None
