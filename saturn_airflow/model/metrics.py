"""Metrics by their names: the losses that every job has, and what jobs measure themselves. Plain data."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Literal

from saturn_airflow.model.errors import InvalidSweepError

Mode = Literal["min", "max"]

#: What Saturn's training loop measures of every job.
LOSSES = ("eval_loss", "epoch_loss", "loss")
#: What a job's run in MLflow has besides; nobody may give another thing one of these names.
TAKEN = frozenset(
    (
        *LOSSES,
        *("step", "steps", "epoch", "lr", "eta_seconds", "samples_per_second", "seconds_per_batch"),
        *("batches", "batches_per_epoch", "total_batches", "seconds_per_batch_spread"),
        *("train_seconds", "setup_seconds", "warmup_seconds", "evaluation_seconds", "ready_seconds"),
        *("mean_seconds_per_batch", "planned_seconds", "actual_seconds", "device_hours"),
        "gpu_hours",  # what versions before called device_hours
        *("peak_device_bytes", "peak_host_bytes"),
    )
)
#: Stands between the name of a metric and that of one of its values, where it has several.
PART = "/"

_NAME = re.compile(r"[A-Za-z_][\w.-]{0,99}", re.ASCII)


def check_name(name: object, what: str) -> None:
    """Check the name that a job gives a metric.

    :raises InvalidSweepError: when it can't be one.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidSweepError(
            f"{what} names a metric {name!r}; a name begins with a letter and has letters, digits, "
            "'_', '-' and '.', at most 100 of them"
        )
    if name in TAKEN:
        raise InvalidSweepError(f"{what} names a metric {name!r}, which Saturn measures itself; rename it")


def check_mode(metric: str | None, mode: object, what: str) -> Mode:
    """Whether ``metric`` is better small or large.

    :param mode: what the user said; None for nothing, which is enough for a loss.
    :param what: who compares, such as ``"selection"``.
    :raises InvalidSweepError: when it is not said of a metric that may be either.
    """
    if mode not in (None, "min", "max"):
        raise InvalidSweepError(f"{what}: mode is {mode!r}; it is 'min' or 'max'")
    if mode is None and metric is not None and metric not in LOSSES:
        raise InvalidSweepError(f"{what}: is {metric!r} better small or large? Say mode='min' or mode='max'")
    return "max" if mode == "max" else "min"


def in_words(event: Mapping[str, Any], digits: int = 4) -> str:
    """What an ``eval`` event tells, as one line."""
    return ", ".join(f"{name} {value:.{digits}f}" for name, value in of_event(event).items())


def of_event(event: Mapping[str, Any]) -> dict[str, float]:
    """What an ``eval`` event tells: ``eval_loss`` and the job's own metrics, NaN where it is no number."""
    told = {key: event[key] for key in ("eval_loss",) if key in event} | (event.get("metrics") or {})
    return {key: math.nan if value is None else float(value) for key, value in told.items()}
