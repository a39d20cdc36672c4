"""The guard of a ``Trainer``: does a training that was stopped go on as if it had not been?"""

from __future__ import annotations

import math
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from saturn_airflow.launch.request import ChangesResultError, Measure, TrainRequest
from saturn_airflow.model import guards
from saturn_airflow.training.ranks import Ranks
from saturn_airflow.training.trainers.training import TrainerTraining

#: The step that is saved, and the last that is compared.
_SAVED, _LAST = 2, 4
#: What the kernels of GPUs, which add in any order, may differ by.
_TOLERANCE = 1e-5


def measure(request: TrainRequest, ranks: Ranks) -> dict[str, Any]:
    """Measure the trainer's steps, and go on from one of them to see whether those after it are the same.

    :returns: what training tells, ``guard`` and ``guard_seconds``.
    :raises ChangesResultError: when they are others.
    """
    with tempfile.TemporaryDirectory(prefix="saturn-trainer-") as folder:
        whole = TrainerTraining(request, ranks, Path(folder), save_at=_SAVED)
        result = whole.run()
        began = time.perf_counter()
        verdict = _compare(whole.losses, request, ranks, Path(folder))
        return {**result, "guard": verdict, "guard_seconds": time.perf_counter() - began}


def check(request: TrainRequest, ranks: Ranks) -> dict[str, Any]:
    """Only compare; see :func:`measure`."""
    request, began = replace(request, measure=Measure()), time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="saturn-trainer-") as folder:
        whole = TrainerTraining(request, ranks, Path(folder), stop_at=_LAST, save_at=_SAVED)
        whole.run()
        verdict = _compare(whole.losses, request, ranks, Path(folder))
    return {"guard": verdict, "guard_seconds": time.perf_counter() - began}


def _compare(losses: list[float], request: TrainRequest, ranks: Ranks, folder: Path) -> str:
    expected = losses[_SAVED:_LAST]
    if not expected:
        return f"{guards.NOT_CHECKED}: it has {len(losses)} steps, too few to be stopped between them"
    silent = replace(ranks, _emit=lambda event: None)
    resumed = TrainerTraining(request, silent, folder, stop_at=_SAVED + len(expected))
    resumed.run()
    tolerance = _TOLERANCE if ranks.device.type == "cuda" else 0.0
    for number, (before, now) in enumerate(zip(expected, resumed.losses, strict=True), _SAVED + 1):
        if not math.isclose(before, now, rel_tol=tolerance):
            raise ChangesResultError(
                f"stopped after step {_SAVED} and resumed, the Trainer's loss at step {number} is {now:.9g}, "
                f"and {before:.9g} where it was not stopped: something that it draws or counts is not in its "
                "checkpoint (a data_collator or a dataset with random numbers of its own, an attribute of "
                "the Trainer or the model); draw it once when the dataset is made, or keep it in a buffer"
            )
    return guards.EXACT
