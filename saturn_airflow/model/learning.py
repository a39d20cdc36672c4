"""What the speeds that were seen say of those that were not.

Let f be the logarithm of actual over estimated seconds of a job under a strategy. It is taken to be a sum of
independent parts: one that all jobs of the same make have in common (they share their estimates, and so the
error), one of the job, one of the technique on so many devices for that make, and one of its own. So speeds
are correlated, and the best linear unbiased prediction (Henderson 1975; in spatial statistics: kriging) of
all f from those that were measured is

    K(all, seen) (K(seen, seen) + noise)^-1 f(seen),     K = sum of the parts that two strategies share.

Only the ratios of the parts matter. A job that was seen to run at 1.3 times its estimate is expected to be
slow under other strategies too, and its sisters are, both less surely so.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from saturn_airflow.model.problem import Option, PlannedJob, Problem

#: Variances of the parts, as shares of the whole: of the make, the job, its strategy for that make, the rest.
MAKE, JOB, STRATEGY, OWN = 0.35, 0.35, 0.15, 0.15
#: Variance of a measurement's error, in the same shares.
NOISE = 0.005


class SeenSpeed(NamedTuple):
    """A measured speed.

    :param factor: actual seconds per batch over estimated.
    """

    job: str
    technique: str
    devices: int
    kind: str
    factor: float


def corrected(problem: Problem, seen: Iterable[SeenSpeed], like: Mapping[str, str] | None = None) -> Problem:
    """``problem`` with the seconds to be expected after what was seen; see :func:`corrected_jobs`."""
    return dataclasses.replace(problem, jobs=corrected_jobs(problem.jobs, seen, like))


def corrected_jobs(
    jobs: tuple[PlannedJob, ...], seen: Iterable[SeenSpeed], like: Mapping[str, str] | None = None
) -> tuple[PlannedJob, ...]:
    """``jobs`` with the seconds that are to be expected after what was seen. Set-ups stay as they are.

    :param like: by job, what jobs of the same make have in common; jobs with equal strategies, if not given.
    """
    known = _latest(seen)
    if not known:
        return jobs
    makes = like or {job.name: _make(job) for job in jobs}
    weights = _solve(
        [[_shared(a, b, makes) + (NOISE if a is b else 0.0) for b in known] for a in known],
        [math.log(s.factor) for s in known],
    )

    def expected(job: str, option: Option, kind: str) -> float:
        asked = SeenSpeed(job, option.technique, option.devices, kind, 1.0)
        log = sum(_shared(asked, s, makes) * weight for s, weight in zip(known, weights, strict=True))
        return option.setup + (option.seconds[kind] - option.setup) * math.exp(log)

    return tuple(
        dataclasses.replace(
            job,
            options=tuple(
                dataclasses.replace(o, seconds={kind: expected(job.name, o, kind) for kind in o.seconds})
                for o in job.options
            ),
        )
        for job in jobs
    )


def _latest(seen: Iterable[SeenSpeed]) -> list[SeenSpeed]:
    """The last measurement of each job under each strategy."""
    return list({entry[:4]: entry for entry in seen if entry.factor > 0}.values())


def _make(job: PlannedJob) -> str:
    """What jobs with equal strategies have in common."""
    return repr([(o.technique, o.devices, sorted(o.seconds.items())) for o in job.options])


def _shared(a: SeenSpeed, b: SeenSpeed, makes: Mapping[str, str]) -> float:
    """Covariance of two speeds."""
    same_job, same_strategy = a.job == b.job, a[1:4] == b[1:4]
    if not same_job and makes.get(a.job, a.job) != makes.get(b.job, b.job):
        return 0.0
    found = MAKE
    if same_strategy:
        found += STRATEGY
    if same_job:
        found += JOB
    if same_job and same_strategy:
        found += OWN
    return found


def _solve(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """x of A x = b for a symmetric positive definite A, by Cholesky."""
    size = len(right)
    lower = [[0.0] * size for _ in range(size)]
    for i in range(size):
        row = lower[i]
        for j in range(i + 1):
            other = lower[j]
            rest = matrix[i][j] - sum([row[k] * other[k] for k in range(j)])
            row[j] = math.sqrt(rest) if i == j else rest / other[j]
    forward: list[float] = []
    for i in range(size):
        forward.append((right[i] - sum([lower[i][k] * forward[k] for k in range(i)])) / lower[i][i])
    found = [0.0] * size
    for i in reversed(range(size)):
        rest = forward[i] - sum([lower[k][i] * found[k] for k in range(i + 1, size)])
        found[i] = rest / lower[i][i]
    return found
