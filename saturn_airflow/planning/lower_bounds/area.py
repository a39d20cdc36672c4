"""Lower bounds that need no model."""

from __future__ import annotations

from saturn_airflow.planning.instances.instance import Instance


def simple_bound(instance: Instance) -> float:
    """A bound of the makespan in seconds: the larger of the longest job at its fastest and the area bound."""
    longest = max(group.earliest_end for group in instance.classes)
    return max(longest, filled(instance))


def filled(instance: Instance) -> float:
    """The area bound: when all devices, from when each is free, have had room for all jobs' least areas.

    That is the C with ``sum over devices of max(0, C - f_d) = sum of areas``: the level of water poured over
    steps of heights f_d.

    :returns: seconds from the plan's start.
    """
    area = sum(len(group.jobs) * group.least_area for group in instance.classes)
    free = sorted(at for kind in instance.types for at in kind.free * len(kind.nodes))
    held = 0.0
    # The first ``number`` devices alone reach the level ``end``, which is it if no other is free before.
    for number, at in enumerate(free, 1):
        held += at
        end = (area + held) / number
        if number == len(free) or end <= free[number]:
            return end
    raise AssertionError("there is a device")


def mean_completion_bound(instance: Instance) -> float:
    """A bound of the weighted mean completion time, in seconds.

    A job of area a under a mode of r seconds has its middle r/2 before its end. Were all D devices one
    machine that takes a/D seconds for it, no order had a smaller sum of weighted middles than that of
    Smith's rule (largest weight per area first). So, with least areas and shortest times,

        sum w end >= sum w r/2 + (sum w middle by Smith's rule).

    Source: Eastman, Even and Isaacs, "Bounds for the optimal scheduling of n jobs on m processors" (1964).
    """
    jobs = []
    for group in instance.classes:
        own = (group.weight, group.least_area / instance.devices, group.shortest, group.earliest_end)
        jobs += [own] * len(group.jobs)
    weight = sum(job[0] for job in jobs)
    if not weight:
        return 0.0
    now = middles = 0.0
    for w, seconds, shortest, _ in sorted(jobs, key=lambda job: -job[0] / job[1]):
        middles += w * (now + seconds / 2 + shortest / 2)
        now += seconds
    alone = sum(w * end for w, _, _, end in jobs)
    return max(middles, alone) / weight
