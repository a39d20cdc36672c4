"""Promises with odds: when sweeps and jobs end, put as ranges.

Errors that might be are drawn by the law of earlier ones, and the cluster is run on under each draw by the
same rules as ever, plans that are made anew included. With n draws, the k-th smallest end is not missed
with odds of k / (n + 1) where the true errors are one more draw of the kind.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.problem import PlannedJob
from saturn_airflow.model.sharing import SharedCluster, SharedSweep, SharingRules
from saturn_airflow.sharing.error_law import ErrorLaw
from saturn_airflow.sharing.replay import Key, replay

#: How often the future is drawn: with these, 90% is the 54th of 60.
DRAWS = 59


@dataclass(frozen=True)
class Ends:
    """When something may end.

    :param drawn: the ends of the draws, in seconds of the cluster's clock, in order; infinite for never.
    """

    drawn: tuple[float, ...]

    def by(self, confidence: float) -> float:
        """The moment by which it ends with this probability; infinite where the draws can't say.

        :raises InvalidSweepError: when that is no probability between 0 and 1.
        """
        if not 0 < confidence < 1:
            raise InvalidSweepError(f"confidence is {confidence!r}; give a probability such as 0.9")
        place = math.ceil(confidence * (len(self.drawn) + 1) - 1e-9)
        return self.drawn[place - 1] if place <= len(self.drawn) else math.inf

    @property
    def median(self) -> float:
        """The moment by which it ends as likely as not."""
        return self.by(0.5)

    def odds(self, moment: float) -> float:
        """The probability that it ends by ``moment``, between 0 and 1."""
        return sum(end <= moment for end in self.drawn) / (len(self.drawn) + 1)


@dataclass(frozen=True)
class Odds:
    """When all sweeps of a cluster may end, if nothing arrives.

    :param jobs: by sweep and job.
    """

    sweeps: Mapping[str, Ends]
    jobs: Mapping[Key, Ends]


def odds(
    cluster: SharedCluster,
    rules: SharingRules,
    law: ErrorLaw,
    *,
    seen: Collection[Key] = (),
    draws: int = DRAWS,
    seed: int = 0,
) -> Odds:
    """Draw the future of ``cluster``.

    :param law: of errors of what is expected now.
    :param seen: running jobs whose speed was seen where they run: what is expected of them there is right.
    :param draws: more of them take longer, and tell rarer ends.
    :raises InvalidSweepError: for less than one draw.
    """
    if draws < 1:
        raise InvalidSweepError(f"draws is {draws!r}; give at least 1")
    sweeps: dict[str, list[float]] = {sweep.name: [] for sweep in cluster.sweeps}
    jobs: dict[Key, list[float]] = {(s.name, job.name): [] for s in cluster.sweeps for job in s.jobs}
    known = frozenset(seen)
    for number in range(draws):
        chance = random.Random(f"{seed} {number}")
        one = law.drawn(chance)
        actual = {
            key: job for sweep in cluster.sweeps for key, job in drawn_jobs(sweep, one, known, chance).items()
        }
        found = replay((), cluster.nodes, rules, begin=cluster, actual=actual)
        ends = dict.fromkeys(jobs, math.inf)
        ends.update({(ran.sweep, ran.job): ran.end for ran in found.ran})
        left = {(sweep.name, job.name) for sweep in found.left.sweeps for job in sweep.jobs}
        for key, values in jobs.items():
            values.append(math.inf if key in left else ends[key])
        for name, values in sweeps.items():
            values.append(found.done.get(name, math.inf))
    return Odds(
        {name: Ends(tuple(sorted(values))) for name, values in sweeps.items()},
        {key: Ends(tuple(sorted(values))) for key, values in jobs.items()},
    )


def drawn_jobs(
    sweep: SharedSweep, law: ErrorLaw, known: frozenset[Key], chance: random.Random
) -> dict[Key, PlannedJob]:
    """What the jobs of ``sweep`` may really take."""
    sights = sum((sweep.name, job.name) in known for job in sweep.jobs)
    # What is expected after jobs were seen has the bias, and what it tells of the shared part, in it.
    bias = 0.0 if sights else law.bias
    shared = bias + chance.gauss(0, 1) * law.after(sights)
    found: dict[Key, PlannedJob] = {}
    for job in sweep.jobs:
        key = (sweep.name, job.name)
        own = shared + chance.gauss(0, law.job)
        here = None
        if key in known and job.place is not None:
            own, here = 0.0, (job.place.technique, job.place.devices)
        options = []
        for option in job.job.options:
            factor = math.exp(own + chance.gauss(0, law.strategy))
            if (option.technique, option.devices) == here:
                factor = 1.0
            seconds = {k: option.setup + (s - option.setup) * factor for k, s in option.seconds.items()}
            options.append(dataclasses.replace(option, seconds=seconds))
        found[key] = dataclasses.replace(job.job, options=tuple(options))
    return found
