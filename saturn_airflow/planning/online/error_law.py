"""How far estimates are off: what the errors of earlier ones say of those to come.

The logarithm of actual over estimated seconds is taken to be a bias and a sum of independent normal parts:
one that all jobs of a sweep share, one that its jobs on a node share, one of the job and one of its strategy
(:mod:`saturn_airflow.model.learning` says how the last two divide). How large the parts are is not
known: the law is what earlier errors leave possible, by Bayes' rule on a grid of standard deviations (Gelman
et al., Bayesian Data Analysis, 2013, ch. 5), with the bias integrated out. Few errors leave much possible,
so that what is predicted has wider tails than a normal distribution.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.learning import JOB, MAKE
from saturn_airflow.model.past_errors import PastError

#: With fewer errors than this nothing is said.
LEAST_ERRORS = 5
#: How many laws are drawn from the posterior, to stand for all that are possible.
POSSIBLE = 199
#: Of what a job's errors vary by, the part that all of its strategies share, where nobody ran under two.
_OF_JOB = JOB / (1 - MAKE)
#: Before anything is known: scale of the half-Cauchy priors of the shared parts, standard deviation of the
#: bias. The own part has a log-uniform prior.
_SHARED_SCALE, _BIAS_SCALE = 0.15, 0.5
_SHARED_GRID = np.concatenate([[0.0], np.geomspace(0.01, 1.5, 23)])
_OWN_GRID = np.geomspace(0.002, 1.5, 48)

_Grid = npt.NDArray[np.float64]


class Parts(NamedTuple):
    """One law that may be the true one: the mean of the logarithm, and standard deviations.

    :param bias: the mean.
    :param sweep: of what jobs of a sweep share.
    :param node: of what its jobs on a node share.
    :param own: of the rest.
    """

    bias: float
    sweep: float
    node: float
    own: float

    @property
    def job(self) -> float:
        """Standard deviation of the part that strategies of a job share."""
        return self.own * math.sqrt(_OF_JOB)

    @property
    def strategy(self) -> float:
        """Standard deviation of what no two strategies share."""
        return self.own * math.sqrt(1 - _OF_JOB)

    def after(self, jobs: int) -> float:
        """Standard deviation of what jobs of a sweep share, given the errors of so many of them.

        That of a normal prior with variance sweep^2, after a mean was observed whose error has the variance
        (own^2 + node^2) / jobs.
        """
        if not jobs or not self.sweep:
            return self.sweep
        seen = (self.own**2 + self.node**2) / jobs
        return math.sqrt(self.sweep**2 * seen / (self.sweep**2 + seen)) if seen else 0.0


@dataclass(frozen=True)
class ErrorLaw:
    """What is known of errors.

    :param possible: laws that are equally probable; a single one for somebody who knows it.
    :param gaps: seconds that earlier jobs waited for devices that were free; each is as probable. None for no
        wait.
    :param errors: how many it was fitted on.
    :param sweeps: of how many sweeps.
    """

    possible: tuple[Parts, ...]
    gaps: tuple[float, ...] = ()
    errors: int = 0
    sweeps: int = 0

    def drawn(self, chance: random.Random) -> Parts:
        """A law that might be the true one."""
        return chance.choice(self.possible)

    def gap(self, chance: random.Random) -> float:
        """What a job might wait for devices that are free."""
        return chance.choice(self.gaps) if self.gaps else 0.0

    def to_dict(self) -> dict[str, Any]:
        """This law as JSON-ready data."""
        return {
            "possible": [list(parts) for parts in self.possible],
            "gaps": list(self.gaps),
            "errors": self.errors,
            "sweeps": self.sweeps,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ErrorLaw:
        """The law that :meth:`to_dict` described.

        :raises ValueError: when it is damaged.
        """
        try:
            possible = tuple(Parts(*map(float, parts)) for parts in data["possible"])
            found = cls(possible, tuple(map(float, data["gaps"])), int(data["errors"]), int(data["sweeps"]))
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"no law of errors: {error}") from None
        if not possible or not all(map(math.isfinite, (*found.gaps, *(x for p in possible for x in p)))):
            raise ValueError("no law of errors: it has no possible one, or numbers that are not finite")
        return found


def fit(errors: Iterable[PastError], seed: int = 0) -> ErrorLaw:
    """The law that ``errors`` of earlier estimates leave possible.

    :param seed: of the draws from the posterior: the same errors give the same law.
    :raises InvalidSweepError: where there are too few, of too few sweeps, or a factor that is not above 0.
    """
    errors = list(errors)
    by_sweep: dict[str, dict[str, list[float]]] = {}
    for error in errors:
        if not 0 < error.factor < math.inf:
            raise InvalidSweepError(
                f"job {error.job!r} took {error.factor!r} times its estimate; give a number above 0"
            )
        by_sweep.setdefault(error.sweep, {}).setdefault(error.node, []).append(math.log(error.factor))
    sweeps = list(by_sweep.values())
    if len(sweeps) < 2 or len(errors) < LEAST_ERRORS:
        jobs = f"{len(errors)} job{'' if len(errors) == 1 else 's'}"
        of = f"{len(sweeps)} earlier sweep{'' if len(sweeps) == 1 else 's'}"
        so_far = f"{jobs} of {of} are too few to say" if sweeps else "no earlier sweep says yet"
        raise InvalidSweepError(
            f"{so_far} how far estimates are off; it takes {LEAST_ERRORS} jobs or more, "
            "of at least two sweeps"
        )
    sweep, node, own = (
        axis.ravel() for axis in np.meshgrid(_SHARED_GRID, _SHARED_GRID, _OWN_GRID, indexing="ij")
    )
    log, mean, variance = _posterior([list(nodes.values()) for nodes in sweeps], sweep, node, own)
    weights = np.exp(log - log.max())
    generator = np.random.default_rng(seed)
    # Stratified: one from each of equally probable parts of the grid.
    at = (np.arange(POSSIBLE) + generator.random(POSSIBLE)) / POSSIBLE
    chosen = np.minimum(np.searchsorted(np.cumsum(weights) / weights.sum(), at), len(weights) - 1)
    bias = generator.normal(mean[chosen], np.sqrt(variance[chosen]))
    possible = zip(bias, sweep[chosen], node[chosen], own[chosen], strict=True)
    return ErrorLaw(
        tuple(Parts(*map(float, parts)) for parts in possible),
        tuple(error.gap for error in errors),
        len(errors),
        len(sweeps),
    )


def _posterior(
    sweeps: Sequence[Sequence[Sequence[float]]], sweep: _Grid, node: _Grid, own: _Grid
) -> tuple[_Grid, _Grid, _Grid]:
    """At each point of the grid the log of its posterior probability, mean and variance of the bias.

    The log is up to a constant.

    :param sweeps: by sweep and node, the logarithms of the factors.
    :param sweep: (points,) standard deviation of the sweep's part; ``node`` and ``own`` likewise.
    :returns: three of shape (points,).
    """
    # The half-Cauchy priors, by the part of the line that each point of the grid stands for. The grid of
    # ``own`` is geometric, so its log-uniform prior is a constant.
    log = -np.log1p((sweep / _SHARED_SCALE) ** 2) - np.log1p((node / _SHARED_SCALE) ** 2)
    log += np.log(_spacing(_SHARED_GRID))[np.searchsorted(_SHARED_GRID, sweep)]
    log += np.log(_spacing(_SHARED_GRID))[np.searchsorted(_SHARED_GRID, node)]
    precision = np.full_like(own, _BIAS_SCALE**-2)
    weighted, squares = np.zeros_like(own), np.zeros_like(own)
    for nodes in sweeps:
        # Two levels, each normal around the next: the mean of a node's logarithms around that of its sweep
        # (with variance ``of_mean``), that of the sweep around the bias (with variance ``of_sweep``). What
        # varies within a node tells of ``own`` alone. Sums over the nodes, weighted by 1 / of_mean: of ones,
        # of the means, and of their squares.
        total, at, about = np.zeros_like(own), np.zeros_like(own), np.zeros_like(own)
        for logs in nodes:
            size, middle = len(logs), sum(logs) / len(logs)
            within = sum((x - middle) ** 2 for x in logs)
            of_mean = node**2 + own**2 / size
            log -= (size - 1) * np.log(own) + within / (2 * own**2) + np.log(of_mean) / 2
            total += 1 / of_mean
            at += middle / of_mean
            about += middle**2 / of_mean
        found, of_sweep = at / total, sweep**2 + 1 / total
        log -= (np.log(total) + np.log(of_sweep) + about - total * found**2) / 2
        precision += 1 / of_sweep
        weighted += found / of_sweep
        squares += found**2 / of_sweep
    mean = weighted / precision
    log -= (np.log(precision) + squares - precision * mean**2) / 2
    return log, mean, 1 / precision


def _spacing(grid: _Grid) -> _Grid:
    """What part of the line each point stands for."""
    edges = np.concatenate([[0.0], (grid[1:] + grid[:-1]) / 2, [grid[-1]]])
    return np.diff(edges)
