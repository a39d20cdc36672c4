"""Promises with odds: when sweeps and jobs end, put as ranges.

Errors that might be are drawn by the law of earlier ones, and the cluster is run on under each draw by the
same rules as ever, plans that are made anew included; see :mod:`saturn_airflow.planning.online.ends`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.problem import PlannedJob
from saturn_airflow.model.sharing import SharedCluster, SharedSweep, SharingRules
from saturn_airflow.planning.online.ends import Ends, drawn_jobs
from saturn_airflow.planning.online.error_law import ErrorLaw, Parts
from saturn_airflow.sharing.replay import Key, replay

#: How often the future is drawn: with these, 90% is the 54th of 60.
DRAWS = 59


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
    law: ErrorLaw | Mapping[str, ErrorLaw],
    *,
    seen: Collection[Key] = (),
    draws: int = DRAWS,
    seed: int = 0,
) -> Odds:
    """Draw the future of ``cluster``.

    :param law: of errors of what is expected now; or one for each sweep. What jobs of a node share is that of
        the first.
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
        actual: dict[Key, PlannedJob] = {}
        slow: dict[str, float] = {}
        for sweep in cluster.sweeps:
            own_law = law if isinstance(law, ErrorLaw) else law[sweep.name]
            parts = own_law.drawn(chance)
            actual |= drawn_sweep(sweep, own_law, parts, known, chance)
            slow = slow or {node.name: math.exp(chance.gauss(0, parts.node)) for node in cluster.nodes}
        found = replay((), cluster.nodes, rules, begin=cluster, actual=actual, slow=slow, sure=known)
        ends = dict.fromkeys(jobs, math.inf)
        # Stays come in order of end, so of a job that gave way the last one counts.
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


def drawn_sweep(
    sweep: SharedSweep, law: ErrorLaw, parts: Parts, known: frozenset[Key], chance: random.Random
) -> dict[Key, PlannedJob]:
    """What the jobs of ``sweep`` may really take, but for what those on a node share."""
    here = {
        job.name: job.place for job in sweep.jobs if (sweep.name, job.name) in known and job.place is not None
    }
    drawn = drawn_jobs([job.job for job in sweep.jobs], law, parts, here, chance)
    return {(sweep.name, job.name): job for job in drawn}
