"""Having many strategies of many jobs guarded in one set of ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import wrong

from saturn_airflow import library
from saturn_airflow.launch.request import ChangesResultError, DoesNotFit, TrainRequest
from saturn_airflow.model.errors import JobError
from saturn_airflow.model.jobs import HParams, Job
from saturn_airflow.training import ranks as ranks_module
from saturn_airflow.training.guarding.guarded import check
from saturn_airflow.training.ranks import Ranks


class Cell(NamedTuple):
    """A job under a technique with its parameters on a number of devices."""

    job: Job
    technique: str
    devices: int = 1
    parameters: dict[str, Any] = {}  # noqa: RUF012 - never changed


def job(**changes: Any) -> Job:
    """A small model of plain torch on pairs of vectors and classes, unless changed."""
    hparams = {"precision": "float64", "batch_size": 6, **changes.pop("hparams", {})}
    fields: dict[str, Any] = {
        "load_model": "odd_models:plain",
        "load_dataloader": "odd_models:vectors",
        "loss_function": "odd_models:mean_loss",
    }
    return Job("cell", hparams=HParams(**hparams), **{**fields, **changes})


def check_all(cells: list[tuple[Job, str, dict[str, Any]]], ranks: Ranks) -> list[str]:
    """The verdict on each, or why it was refused, after how."""
    for name, wrong_one in wrong.TECHNIQUES.items():
        library.register(name, wrong_one)
    verdicts = []
    for a_job, technique, parameters in cells:
        request = TrainRequest(job=a_job, technique=technique, parameters=parameters)
        try:
            verdicts.append(check(request, ranks)["guard"])
        except ChangesResultError as reason:
            verdicts.append(f"refused: {reason}")
        except DoesNotFit as reason:
            verdicts.append(f"can't: {reason}")
        except JobError as error:
            verdicts.append(f"job: {error}")
    return verdicts


def verdicts(cells: list[Cell]) -> list[str]:
    """What the guard says of each cell."""
    found = [""] * len(cells)
    for size in sorted({cell.devices for cell in cells}):
        chosen = [i for i, cell in enumerate(cells) if cell.devices == size]
        asked = [(cells[i].job, cells[i].technique, cells[i].parameters) for i in chosen]
        for i, verdict in zip(chosen, ranks_module.launch(check_all, asked, size=size)[0], strict=True):
            found[i] = verdict
    return found
