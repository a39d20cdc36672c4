"""A job's parameters and tags as MLflow compares them best: flat, typed, under stable names."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from saturn_airflow.model import clear_secrets
from saturn_airflow.model.initial_weights import SCRATCH
from saturn_airflow.model.jobs import Job

# Limits of https://mlflow.org/docs/latest/api_reference/rest-api.html#request-limits
_KEY_LENGTH = 250
_PARAM_LENGTH = 6000
_TAG_LENGTH = 8000
_DATA = "data."
#: The names of a job's own metrics, as JSON.
METRICS_TAG = "saturn.metrics"
#: What may be another when a job comes back, or in its turn.
STRATEGY = frozenset({"technique", "devices", "node"})
_VERSION = "data_version"
_NOT_IN_KEYS = re.compile(r"[^\w./ -]")


def job_params(job: Job, **strategy: Any) -> dict[str, str]:
    """The parameters of a job's run.

    Hyper-parameters stand under their own names (``lr``, ``batch_size``...), arguments behind what takes
    them (``model.layers``, ``data.rows``, ``optimizer.weight_decay``, ``lr_scheduler.T_max``).

    :param strategy: how the job is trained: ``technique``, ``devices``, ``node`` and the like.
    """
    hparams = job.hparams
    stopping: Any = hparams.early_stopping
    return flat(
        {
            "lr": hparams.lr,
            "batch_size": hparams.batch_size,
            "epochs": hparams.epochs,
            "batches": hparams.batches,
            "seed": hparams.seed,
            "precision": hparams.precision,
            "accumulate": hparams.accumulate,
            "compile": hparams.compile,
            "clip_grad_norm": hparams.clip_grad_norm,
            "optimizer": _short(hparams.optimizer),
            "lr_scheduler": _short(hparams.lr_scheduler),
            "early_stopping": dataclasses.asdict(stopping) if stopping else None,
            "load_model": job.load_model,
            "load_dataloader": job.load_dataloader or None,
            "load_eval_dataloader": job.load_eval_dataloader,
            "loss_function": job.loss_function,
            "data_version": job.data_version,
            "init_from": job.init_from or ("scratch" if job.init_missing == SCRATCH else None),
            **{f"metric.{key}": value for key, value in job.metrics.items()},
            **{f"model.{key}": value for key, value in clear_secrets.shown(job.model_args).items()},
            **{f"data.{key}": value for key, value in clear_secrets.shown(job.data_args).items()},
            **{f"optimizer.{key}": value for key, value in hparams.optimizer_args.items()},
            **{f"lr_scheduler.{key}": value for key, value in hparams.lr_scheduler_args.items()},
            **strategy,
        }
    )


def job_tags(job: Job) -> dict[str, str]:
    """The tags of a job's run that say what it measures; none where it measures nothing of its own."""
    return {METRICS_TAG: json.dumps(list(job.metrics))} if job.metrics else {}


def flat(params: Mapping[str, Any]) -> dict[str, str]:
    """Parameters as MLflow takes them: nested mappings joined with dots, None left out, values as text."""
    return {_key(key): _text(value)[:_PARAM_LENGTH] for key, value in _leaves(params, "")}


def datasets(params: Mapping[str, Any]) -> list[dict[str, str]]:
    """What a job with these parameters reads, as the fields of MLflow's datasets, and as what it reads it.

    A dataset is named like the loader that makes it. Its digest is of the loader's arguments, so two jobs
    read the same data where name and digest are the same and the loader's code is.
    """
    found = flat(params)
    arguments = {key[len(_DATA) :]: value for key, value in sorted(found.items()) if key.startswith(_DATA)}
    arguments |= {_VERSION: found[_VERSION]} if _VERSION in found else {}
    digest = hashlib.sha256(json.dumps(arguments).encode()).hexdigest()[:8]
    return [
        {
            "name": found[key],
            "digest": digest,
            "source_type": "code",
            "source": json.dumps({"tags": {"mlflow.source.name": found[key], **arguments}}),
            "profile": json.dumps(arguments),
            "context": context,
        }
        for key, context in (("load_dataloader", "training"), ("load_eval_dataloader", "evaluation"))
        if key in found
    ]


def tags(values: Mapping[str, Any]) -> dict[str, str]:
    """Tags as MLflow takes them."""
    return {_key(key): _text(value)[:_TAG_LENGTH] for key, value in values.items() if value is not None}


def metric_key(name: str) -> str:
    """``name`` as the key of a metric."""
    return _key(name)


def _leaves(params: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in params.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", value


def _key(key: str) -> str:
    # A key must also be a path in canonical form that leads nowhere above, since file stores use it as one.
    parts = [part for part in _NOT_IN_KEYS.sub("_", str(key)).split("/") if part.strip(". ")]
    return re.sub(r"^\.\.+", "_", "/".join(parts))[:_KEY_LENGTH].rstrip("/") or "_"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _short(reference: Any) -> str | None:
    return None if reference is None else str(reference).rpartition(":")[2]
