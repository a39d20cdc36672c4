"""How long batches take: when a trial has timed enough of them, and what they come to."""

from __future__ import annotations

import math
import statistics

import torch

from saturn_airflow.launch.request import Measure

# The standard error at which a mean is precise, as a share of it.
_PRECISION = 0.02


def wait_for(device: torch.device) -> None:
    """Wait until ``device`` has done what it was asked to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def is_enough(measure: Measure, seconds: list[float], timed: float) -> bool:
    """Whether the timed batches tell how long a batch takes.

    :param seconds: of each, after the warm-ups.
    :param timed: seconds since the first of them began.
    """
    if len(seconds) < measure.batches or timed < measure.least_seconds:
        return False
    if timed >= measure.precise_seconds or len(seconds) < 2:
        return True
    standard_error = statistics.stdev(seconds) / math.sqrt(len(seconds))
    return standard_error <= _PRECISION * statistics.fmean(seconds)


def summary(seconds: list[float], warmups: int) -> dict[str, float]:
    """What the batches took: ``warmup_seconds`` (what the first took longer than the others),
    ``seconds_per_batch`` (mean of the others) and ``spread`` (interquartile range over the median)."""
    # The first batches are slow; they count as such where there are others to compare them with.
    first, steady = seconds[:warmups], seconds[warmups:]
    if not steady:
        first, steady = [], seconds
    median = statistics.median(steady) if steady else 0.0
    mean = statistics.fmean(steady or [0.0])
    return {
        "warmup_seconds": max(0.0, sum(first) - len(first) * mean),
        "seconds_per_batch": mean,
        "spread": _interquartile_range(steady) / median if median else 0.0,
    }


def _interquartile_range(values: list[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low
