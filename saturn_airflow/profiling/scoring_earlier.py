"""Scoring a model that was trained earlier, by the evaluation data and metrics of a job of this sweep."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from saturn_airflow import library
from saturn_airflow.launch import runs
from saturn_airflow.launch.handed_over import NOTHING, HandedOver
from saturn_airflow.launch.runs import RunSpec
from saturn_airflow.model.cluster import Node
from saturn_airflow.model.errors import SaturnError
from saturn_airflow.model.jobs import HParams, Job
from saturn_airflow.model.outcomes import Planned
from saturn_airflow.model.status import Status

#: What of the hyper-parameters an evaluation depends on; by the seed a job may choose its evaluation data.
_EVALUATING = ("batch_size", "precision", "accumulate", "seed")


def job_of(champion: Job, best: Job, version: str) -> Job:
    """The job whose model is ``champion``'s and whose evaluation is ``best``'s.

    :param version: where its weights are, such as ``models:/digits/3``.
    """
    hparams = HParams(**{name: getattr(best.hparams, name) for name in _EVALUATING})
    return dataclasses.replace(
        best,
        name=f"champion of {best.name}"[:200],
        load_model=champion.load_model,
        model_args=champion.model_args,
        hparams=hparams,
        init_from=version,
        neutral=(),
        on_step=None,
        on_epoch=None,
    )


def strategy_of(champion: Job, best: Job, planned: Planned) -> dict[str, Any]:
    """What to evaluate the champion under: what trained ``best``, where the champion is of the same make."""
    alike = (champion.load_model, champion.model_args) == (best.load_model, best.model_args)
    if alike and not library.get(planned.technique).trains_by_itself:
        return {name: getattr(planned, name) for name in ("technique", "devices", "parameters")}
    return {"technique": "single", "devices": 1, "parameters": {}}


def score(
    job: Job,
    strategy: Mapping[str, Any],
    node: Node,
    *,
    weights: str,
    folder: Path,
    holder: str,
    leases_folder: str | None = None,
    technique_folders: tuple[str, ...] = (),
    path: tuple[str, ...] = (),
    handed: HandedOver = NOTHING,
    log: Callable[[str], object] = lambda line: None,
) -> dict[str, Any]:
    """Evaluate ``job``'s model with the weights of a file on any free devices of ``node``, this machine.

    :param strategy: ``technique``, ``devices`` and ``parameters``.
    :param handed: secrets for its processes.
    :returns: ``eval_loss`` and ``metrics``.
    :raises SaturnError: when that is not possible, with the reason.
    """
    spec = RunSpec(
        mode="score",
        job=job,
        **strategy,
        node=node.name,
        kind=node.kind,
        slots=node.devices,
        priority=(time.time(), 0),
        holder=holder,
        folder=str(folder),
        leases_folder=leases_folder,
        technique_folders=technique_folders,
        path=path,
        initial_weights=weights,
    )
    run = runs.start(spec, handed)
    end: Mapping[str, Any] = {}
    try:
        for event in run.events():
            if event["event"] == "waiting":
                log(f"Waiting for devices held by {'; '.join(event['for'])}")
            elif event["event"] == "warning":
                log(event["message"])
            end = event
    finally:
        run.kill()
    if end.get("status") != Status.FINISHED:
        log(str(end.get("traceback") or ""))
        raise SaturnError(str(end.get("reason")))
    return dict(end["result"])
