"""How long batches take: when a trial has timed enough of them, and what they come to."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch

from saturn_airflow.launch.request import Measure

# The standard error at which a mean is precise, as a share of it.
_PRECISION = 0.02
# Batches of the evaluation data that a trial evaluates on each device.
_EVALUATED = 8


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


def of_evaluation(evaluate: Callable[[int], object], batches: int | None, at_once: int) -> float:
    """How many seconds a pass over the evaluation data takes, by a few of their batches.

    :param evaluate: called with how many batches to evaluate.
    :param batches: of a whole pass; None where nobody knows.
    :param at_once: how many the ranks evaluate side by side.
    """

    def time_of(limit: int) -> float:
        began = time.perf_counter()
        evaluate(limit)
        return time.perf_counter() - began

    count = math.ceil((batches or _EVALUATED * at_once) / at_once)
    few = min(count, _EVALUATED)
    # The first time is slow. What a pass costs however short it is drops out of the difference of the others.
    _, first, several = (time_of(limit * at_once) for limit in (1, 1, few))
    each = max(0.0, several - first) / (few - 1) if few > 1 else 0.0
    return several + (count - few) * each
