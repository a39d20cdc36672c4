"""What jobs are expected to take once it was seen how fast some of them train."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from saturn_airflow.model.learning import SeenSpeed, corrected_jobs
from saturn_airflow.model.sharing import Pace, SharedSweep

#: Seconds, and the share of its training, after which the speed of a job is known.
SEEN_SECONDS, SEEN_SHARE = 60.0, 0.02


def at_pace_seen(
    sweep: SharedSweep, paces: Mapping[str, Pace], kinds: Mapping[str, str], off_by: float
) -> SharedSweep:
    """``sweep`` with the seconds to be expected of its jobs after what was seen of those that run.

    :param paces: by job.
    :param kinds: of the nodes' devices.
    :param off_by: where none is off by more than this share of what was expected, nothing changes.
    """
    seen = []
    for job in sweep.jobs:
        kind = None if job.place is None else kinds.get(job.place.node)
        if job.place is None or kind is None or job.name not in paces:
            continue
        pace, place = paces[job.name], job.place
        net = job.option.seconds[kind] - job.option.setup
        # What claims say may be so small that it is nothing together.
        expected = pace.share * net
        if expected <= 0 or pace.seconds < max(SEEN_SECONDS, SEEN_SHARE * net):
            continue
        factor = pace.seconds / expected
        if not math.isfinite(factor):
            continue
        # Before an epoch has ended, evaluations may be to come, which the estimate has in it.
        if factor > 1 or pace.saw_epoch_end:
            seen.append(SeenSpeed(job.name, place.technique, place.devices, kind, factor))
    if all(abs(one.factor - 1) <= off_by for one in seen):
        return sweep
    found = corrected_jobs(tuple(job.job for job in sweep.jobs), seen)
    both = zip(sweep.jobs, found, strict=True)
    return replace(sweep, jobs=tuple(replace(job, job=expected) for job, expected in both))
