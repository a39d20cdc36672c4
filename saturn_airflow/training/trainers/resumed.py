"""The guard of a ``Trainer``: does a training that was stopped go on as if it had not been?"""

from __future__ import annotations

import contextlib
import itertools
import math
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from saturn_airflow.launch.request import ChangesResultError, Measure, TrainRequest
from saturn_airflow.model import guards
from saturn_airflow.model.errors import JobError
from saturn_airflow.training.guarding.users_state import UsersState
from saturn_airflow.training.ranks import Ranks
from saturn_airflow.training.trainers.seen_state import differing
from saturn_airflow.training.trainers.training import TrainerTraining

#: The step that is saved, and the last that is compared.
_SAVED, _LAST = 2, 4
#: What the kernels of GPUs, which add in any order, may differ by; or so many times what two trainings that
#: nobody stopped do, for in 16 bits some steps make much of little.
_TOLERANCE, _TIMES_NOISE = 1e-5, 10.0
# The same of the sum of a tensor, in which much may cancel out.
_TOLERANCE_OF_SUMS = 1e-2


def measure(request: TrainRequest, ranks: Ranks) -> dict[str, Any]:
    """Measure the trainer's steps, and go on from one of them to see whether those after it are the same.

    :returns: what training tells, ``guard`` and ``guard_seconds``.
    :raises ChangesResultError: when they are others.
    """
    with tempfile.TemporaryDirectory(prefix="saturn-trainer-") as folder:
        whole = TrainerTraining(request, ranks, Path(folder), save_at=_SAVED, look_until=_LAST)
        code = _code_of(whole)
        result = whole.run()
        began = time.perf_counter()
        verdict = _compare(whole, code, request, ranks, Path(folder))
        return {**result, "guard": verdict, "guard_seconds": time.perf_counter() - began}


def check(request: TrainRequest, ranks: Ranks) -> dict[str, Any]:
    """Only compare; see :func:`measure`."""
    request, began = replace(request, measure=Measure()), time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="saturn-trainer-") as folder:
        whole = TrainerTraining(request, ranks, Path(folder), _LAST, _SAVED, _LAST)
        code = _code_of(whole)
        whole.run()
        verdict = _compare(whole, code, request, ranks, Path(folder))
    return {"guard": verdict, "guard_seconds": time.perf_counter() - began}


def _code_of(training: TrainerTraining) -> UsersState:
    """What the job's code remembers before training, which resumes in a process of its own."""
    model: Any = training.trainer.model
    return UsersState(training.job, model)


def _compare(
    whole: TrainerTraining, code: UsersState, request: TrainRequest, ranks: Ranks, folder: Path
) -> str:
    expected = whole.losses[_SAVED:_LAST]
    if not expected:
        return f"{guards.NOT_CHECKED}: it has {len(whole.losses)} steps, too few to be stopped between them"
    silent, last = replace(ranks, _emit=lambda event: None), _SAVED + len(expected)

    def again(folder: Path) -> TrainerTraining:
        with contextlib.suppress(JobError):  # what is too large to be put back
            code.restore()
        training = TrainerTraining(request, silent, folder, stop_at=last, look_until=last)
        training.run()
        return training

    resumed = again(folder)
    tolerance = _TOLERANCE if ranks.device.type == "cuda" else 0.0
    if tolerance and _furthest(expected, resumed.losses) > tolerance:
        with tempfile.TemporaryDirectory(prefix="saturn-trainer-") as other:
            noise = _furthest(expected, again(Path(other)).losses[_SAVED:])
        tolerance = max(tolerance, _TIMES_NOISE * noise)
    _refuse_other_losses(expected, resumed.losses, tolerance)
    noise = _TOLERANCE_OF_SUMS if ranks.device.type == "cuda" else 0.0
    if lost := [*differing(whole.seen[last], resumed.seen[last]), *_others(whole, resumed, noise)]:
        # Such as a time of day: it differs each time, stopped or not.
        with tempfile.TemporaryDirectory(prefix="saturn-trainer-") as other:
            unstopped = again(Path(other))
        each_time = differing(whole.seen[last], unstopped.seen[last])
        each_time += _others(whole, unstopped, noise)
        lost = sorted(set(lost) - set(each_time))
    if lost:
        raise ChangesResultError(
            f"stopped after step {_SAVED} and resumed, after step {last} {', '.join(lost[:3])} is not what "
            "it was without the stop: no checkpoint of the Trainer has it. Keep it in a buffer of the model, "
            "or as a number or list that is an attribute of a callback or of the Trainer's class"
        )
    return guards.EXACT


def _others(whole: TrainerTraining, other: TrainerTraining, tolerance: float) -> list[str]:
    """The tensors of the model that are not those of ``whole``, as far as their sums tell."""
    pairs = [(name, was, other.sums.get(name, math.inf)) for name, was in whole.sums.items()]
    return [
        name
        for name, was, now in pairs
        if not (math.isclose(was, now, rel_tol=tolerance, abs_tol=tolerance) or was != was)
    ]


def _furthest(losses: list[float], others: list[float]) -> float:
    """How far losses of the same steps are apart at most, as a share."""
    pairs = zip(losses, others, strict=False)
    return max((abs(a - b) / max(abs(a), abs(b)) for a, b in pairs if a != b), default=0.0)


def _refuse_other_losses(expected: list[float], resumed: list[float], tolerance: float) -> None:
    for number, (before, now) in enumerate(itertools.zip_longest(expected, resumed), _SAVED + 1):
        if before is None or now is None or not math.isclose(before, now, rel_tol=tolerance):
            was, is_now = ("none" if loss is None else f"{loss:.9g}" for loss in (before, now))
            raise ChangesResultError(
                f"stopped after step {_SAVED} and resumed, the Trainer's loss at step {number} is {is_now}, "
                f"and {was} where it was not stopped: something that it draws or counts is not in its "
                "checkpoint (a data_collator or a dataset with random numbers of its own, an attribute of "
                "the Trainer or the model), or on_train_begin changes the model once more; draw it once when "
                "the dataset is made, keep it in a buffer, or change the model where it is made"
            )
