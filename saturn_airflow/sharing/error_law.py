"""How far estimates are off: what the errors of earlier ones say of those to come.

The logarithm of actual over estimated seconds is taken to be a bias and a sum of three independent normal
parts: one that all jobs of a sweep share, one of the job, one of its strategy; as in
:mod:`saturn_airflow.planning.online.learning`, of whose parts the last two are one here.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.planning.online.learning import JOB, MAKE

#: With fewer errors than this nothing is said.
LEAST_ERRORS = 5
#: Of what a job's errors vary by, the part that all of its strategies share, where nobody ran under two.
_OF_JOB = JOB / (1 - MAKE)


class PastError(NamedTuple):
    """A job's error.

    :param sweep: what jobs whose errors have something in common share.
    :param factor: actual over estimated seconds of training.
    """

    sweep: str
    job: str
    factor: float


@dataclass(frozen=True)
class ErrorLaw:
    """Parts of the errors.

    :param bias: mean of the logarithm.
    :param sweep: standard deviation of the part that jobs of a sweep share.
    :param job: of the part that strategies of a job share.
    :param strategy: of the rest.
    :param sweeps: how many sweeps it was fitted on; infinite for one who knows it.
    :param jobs: how many jobs.
    """

    bias: float
    sweep: float
    job: float
    strategy: float
    sweeps: float = math.inf
    jobs: float = math.inf

    def drawn(self, chance: random.Random) -> ErrorLaw:
        """A law that might be the true one as well: what is not known for sure of this one, drawn.

        Variances are drawn as if from scaled inverse chi-square distributions, the bias from a normal one.
        """
        if self.jobs == math.inf:
            return self
        own = math.hypot(self.job, self.strategy)
        wider = _inverse_chi(chance, self.jobs - self.sweeps)
        shared = self.sweep * _inverse_chi(chance, self.sweeps - 1)
        of_mean = math.sqrt(shared**2 / self.sweeps + (own * wider) ** 2 / self.jobs)
        return ErrorLaw(self.bias + chance.gauss(0, of_mean), shared, self.job * wider, self.strategy * wider)

    def after(self, jobs: int) -> float:
        """Standard deviation of what jobs of a sweep share, when so many of them were seen."""
        if not jobs or not self.sweep:
            return self.sweep
        seen = (self.job**2 + self.strategy**2) / jobs
        return math.sqrt(self.sweep**2 * seen / (self.sweep**2 + seen)) if seen else 0.0


def fit(errors: Iterable[PastError]) -> ErrorLaw:
    """The law of ``errors``, by the analysis of variance of one way of grouping (Searle 1971).

    :raises InvalidSweepError: where there are too few, of too few sweeps, or a factor that is not above 0.
    """
    by_sweep: dict[str, list[float]] = {}
    for error in errors:
        if not 0 < error.factor < math.inf:
            raise InvalidSweepError(
                f"job {error.job!r} took {error.factor!r} times its estimate; give a number above 0"
            )
        by_sweep.setdefault(error.sweep, []).append(math.log(error.factor))
    groups: Sequence[list[float]] = list(by_sweep.values())
    jobs, sweeps = sum(map(len, groups)), len(groups)
    if jobs - sweeps < 1 or sweeps < 2 or jobs < LEAST_ERRORS:
        raise InvalidSweepError(
            f"{jobs} errors of {sweeps} sweeps are too few to say how far estimates are off; "
            f"give {LEAST_ERRORS} or more, of at least two sweeps, one of which has several jobs"
        )
    means = [sum(group) / len(group) for group in groups]
    mean = sum(map(sum, groups)) / jobs
    pairs = list(zip(groups, means, strict=True))
    within = sum((x - m) ** 2 for group, m in pairs for x in group) / (jobs - sweeps)
    between = sum(len(group) * (m - mean) ** 2 for group, m in pairs) / (sweeps - 1)
    size = (jobs - sum(len(group) ** 2 for group in groups) / jobs) / (sweeps - 1)
    shared = max(0.0, (between - within) / size)
    return ErrorLaw(
        mean,
        math.sqrt(shared),
        math.sqrt(within * _OF_JOB),
        math.sqrt(within * (1 - _OF_JOB)),
        float(sweeps),
        float(jobs),
    )


def _inverse_chi(chance: random.Random, freedom: float) -> float:
    """By how much a standard deviation may be larger that was estimated with such degrees of freedom."""
    return math.sqrt(freedom / max(chance.gammavariate(freedom / 2, 2.0), 1e-9))
