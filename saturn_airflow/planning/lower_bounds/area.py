"""Lower bounds that need no model."""

from __future__ import annotations

from saturn_airflow.planning.instances.instance import Instance


def simple_bound(instance: Instance) -> float:
    """Of the makespan: the longest job at its fastest, and all least areas on all devices."""
    area = sum(len(group.jobs) * group.least_area for group in instance.classes)
    longest = max(group.release + group.shortest for group in instance.classes)
    return max(longest, area / instance.devices)


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
        jobs += [(group.weight, group.least_area / instance.devices, group.shortest, group.release)] * len(
            group.jobs
        )
    weight = sum(job[0] for job in jobs)
    if not weight:
        return 0.0
    now = middles = 0.0
    for w, seconds, shortest, _ in sorted(jobs, key=lambda job: -job[0] / job[1]):
        middles += w * (now + seconds / 2 + shortest / 2)
        now += seconds
    alone = sum(w * (release + shortest) for w, _, shortest, release in jobs)
    return max(middles, alone) / weight
