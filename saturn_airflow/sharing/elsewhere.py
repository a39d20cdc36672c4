"""Whether a sweep would be done earlier if its jobs that wait went to other nodes than planned."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from saturn_airflow.model.sharing import SharedCluster, SharedJob, SharedSweep, SharingRules
from saturn_airflow.sharing.forecast import plan_together


@dataclass(frozen=True)
class Elsewhere:
    """When a sweep is expected to be done, in seconds of the cluster's clock; infinite for never.

    :param here: as it is planned.
    :param there: with its jobs that wait on whatever node is best.
    """

    here: float
    there: float

    @property
    def won(self) -> float:
        """Seconds that going elsewhere wins."""
        return max(0.0, self.here - self.there) if math.isfinite(self.there) else 0.0


def look_elsewhere(
    cluster: SharedCluster, rules: SharingRules, sweep: str, nodes_of: Mapping[str, tuple[str, ...]]
) -> Elsewhere:
    """What to expect of ``sweep``, one of ``cluster``, in which it has all of its strategies.

    :param nodes_of: by job, the nodes that it may run on.
    :raises AssertionError: when what is expected never ends, which is a mistake of Saturn's.
    """
    here, there = (
        plan_together(replace(cluster, sweeps=sweeps), rules).sweeps.get(sweep, math.inf)
        for sweeps in (
            tuple(one.as_kept() for one in cluster.sweeps),
            tuple(_freed(one, nodes_of) if one.name == sweep else one for one in cluster.sweeps),
        )
    )
    return Elsewhere(here, there)


def _freed(sweep: SharedSweep, nodes_of: Mapping[str, tuple[str, ...]]) -> SharedSweep:
    """``sweep`` with its jobs that wait bound to these nodes, instead of those of its plan."""
    return replace(sweep, jobs=tuple(_freed_job(job, nodes_of) for job in sweep.jobs))


def _freed_job(job: SharedJob, nodes_of: Mapping[str, tuple[str, ...]]) -> SharedJob:
    if job.place is not None or job.name not in nodes_of:
        return job
    return replace(job, job=replace(job.job, nodes=nodes_of[job.name]))
