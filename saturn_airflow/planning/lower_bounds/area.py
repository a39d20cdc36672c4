"""Lower bounds that need no model."""

from __future__ import annotations

from saturn_airflow.planning.instances.instance import Instance


def simple_bound(instance: Instance) -> float:
    """Of the makespan: the longest job at its fastest, and all least areas on all devices."""
    longest = max(group.earliest_end for group in instance.classes)
    return max(longest, filled(instance))


def filled(instance: Instance) -> float:
    """Seconds after which the devices, from when each is free, have had the least areas of all jobs."""
    area = sum(len(group.jobs) * group.least_area for group in instance.classes)
    free = sorted(at for kind in instance.types for at in kind.free * len(kind.nodes))
    held = 0.0
    for number, at in enumerate(free, 1):
        held += at
        end = (area + held) / number
        if number == len(free) or end <= free[number]:
            return end
    raise AssertionError("there is a device")


def mean_completion_bound(instance: Instance) -> float:
    """Of the weighted mean completion time.

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
