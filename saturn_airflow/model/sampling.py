"""Samples of jobs: values drawn from ranges, at random or evenly spread."""

from __future__ import annotations

import json
import math
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from saturn_airflow.model.arguments import plain
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.grids import choices
from saturn_airflow.model.jobs import Job
from saturn_airflow.model.variations import Variations

METHODS = ("random", "sobol")
_WANTED = "a list of values, uniform(...), loguniform(...), randint(...), or a distribution of scipy.stats"
#: Points drawn for each job until there are declared to be too few different ones.
_POINTS_PER_JOB = 64


def sample(
    job: Job,
    n: int,
    dotted: Mapping[str, Any] | None = None,
    /,
    *,
    seed: int = 0,
    method: str = "random",
    **values: Any,
) -> list[Job]:
    """``n`` jobs with values drawn from ranges. More of the same seed begin with the same jobs.

    Keys are those of :func:`grid`. A range is :func:`uniform`, :func:`loguniform`, :func:`randint`, a list to
    choose from, or a frozen distribution of ``scipy.stats``. No two jobs have the same values. Names may
    hold ``{sample}``, the number of the job from 0, besides the values: ``"gpt2-{sample}-{lr:.1e}"``.

    :param dotted: the same for keys with dots, and for keys that are called like a parameter of this
        function: ``{"optimizer_args.weight_decay": loguniform(1e-4, 1e-1), "seed": [0, 1, 2]}``.
    :param seed: of what is drawn. The jobs' own is a hyper-parameter, and goes into ``dotted`` to be varied.
    :param method: ``"random"``, or ``"sobol"`` for points that are spread more evenly (best where ``n`` is a
        power of two), which imports ``scipy.stats``: a second, each time a DAG file is parsed.
    :raises InvalidSweepError: for a key that is nowhere to be put, something that is no range, fewer than
        ``n`` different combinations, or names that come out equal.
    """
    ranges = {**(dotted or {}), **values}
    variations = Variations(job, ranges, "sample")
    for name, given, least in (("n", n, 1), ("seed", seed, 0)):
        if not isinstance(plain(given), int) or isinstance(given, bool) or given < least:
            raise InvalidSweepError(
                f"sample: {name} is {given!r:.80}; it must be a whole number of at least {least}"
                + (" (to vary that of the jobs write {'seed': [0, 1]})" if name == "seed" else "")
            )
    if method not in METHODS:
        raise InvalidSweepError(f"sample: method is {method!r}; choose one of {', '.join(METHODS)}")
    if not ranges:
        raise InvalidSweepError("sample: nothing varies; give ranges, such as lr=loguniform(1e-5, 1e-2)")
    draw = {key: _quantiles(key, given) for key, given in ranges.items()}
    points = (_random if method == "random" else _sobol)(len(draw), int(seed), n * _POINTS_PER_JOB)
    different: dict[str, Job] = {}
    for point in points:
        drawn = {key: plain(quantile(at)) for (key, quantile), at in zip(draw.items(), point, strict=True)}
        number = len(different)
        different.setdefault(
            json.dumps(drawn, sort_keys=True, default=repr), variations.job(drawn, {"sample": number})
        )
        if len(different) == n:
            break
    else:
        raise InvalidSweepError(
            f"sample: {n} jobs were asked for, and {len(different)} different ones found; grid(...) has all "
            "combinations of a few values"
        )
    jobs = list(different.values())
    variations.check_names(jobs, f"name the job '{job.name}-{{sample}}'")
    return jobs


@dataclass(frozen=True)
class _Range:
    """A range of numbers, as what ``sample`` asks of it: the quantile of a number in [0, 1).

    Distributions of ``scipy.stats`` name it alike.
    """

    low: float
    high: float

    def ppf(self, at: float) -> float:
        return self.low + (self.high - self.low) * at


class _LogRange(_Range):
    def ppf(self, at: float) -> float:
        low, high = math.log(self.low), math.log(self.high)
        return min(max(math.exp(low + (high - low) * at), self.low), self.high)


class _Integers(_Range):
    def ppf(self, at: float) -> int:
        return int(self.low) + int((self.high - self.low) * at)


def uniform(low: float, high: float) -> _Range:
    """Numbers between ``low`` and ``high``, each as likely as the others.

    :raises InvalidSweepError: for bounds that are no numbers, or in the wrong order.
    """
    return _Range(*_bounds("uniform", low, high))


def loguniform(low: float, high: float) -> _Range:
    """Numbers between ``low``, which is above 0, and ``high``, each order of magnitude as likely.

    :raises InvalidSweepError: for bounds that are no numbers, in the wrong order, or not above 0.
    """
    low, high = _bounds("loguniform", low, high)
    if low <= 0:
        raise InvalidSweepError(f"loguniform({low}, {high}): low must be above 0")
    return _LogRange(low, high)


def randint(low: int, high: int) -> _Range:
    """Whole numbers from ``low`` to ``high - 1``, as numpy's and Ray's of that name.

    :raises InvalidSweepError: for bounds that are no whole numbers, or in the wrong order.
    """
    low, high = plain(low), plain(high)
    if not isinstance(low, int) or not isinstance(high, int):
        raise InvalidSweepError(f"randint({low!r}, {high!r}): give whole numbers")
    return _Integers(*_bounds("randint", low, high))


def _bounds(name: str, low: Any, high: Any) -> tuple[Any, Any]:
    low, high = plain(low), plain(high)
    if not all(isinstance(bound, int | float) and math.isfinite(bound) for bound in (low, high)):
        raise InvalidSweepError(f"{name}({low!r}, {high!r}): give two numbers")
    if not low < high:
        raise InvalidSweepError(f"{name}({low!r}, {high!r}): low must be below high")
    return low, high


def _quantiles(key: str, given: Any) -> Callable[[float], Any]:
    quantile = getattr(given, "ppf", None)
    if callable(quantile):
        # The quantile of 0 is no value of some of scipy's.
        return lambda at: _whole(quantile(at or 2.0**-53), given)
    listed = choices(key, given, "sample", _WANTED)
    return lambda at: listed[int(at * len(listed))]


def _whole(value: Any, given: Any) -> Any:
    """scipy's discrete distributions tell their whole numbers as floating-point numbers."""
    discrete = hasattr(getattr(given, "dist", None), "pmf")
    return int(value) if discrete else value


def _random(dimensions: int, seed: int, most: int) -> Iterator[Sequence[float]]:
    drawn = random.Random(seed)
    for _ in range(most):
        yield [drawn.random() for _ in range(dimensions)]


def _sobol(dimensions: int, seed: int, most: int) -> Iterator[Sequence[float]]:
    import numpy as np
    from scipy.stats import qmc

    sequence = qmc.Sobol(dimensions, rng=np.random.default_rng(seed))
    with warnings.catch_warnings():
        # It wants powers of two at once, of which the first n are what is drawn n at a time.
        warnings.filterwarnings("ignore", "The balance properties of Sobol")
        for _ in range(most):
            yield sequence.random(1)[0].tolist()
