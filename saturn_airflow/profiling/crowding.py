"""How much longer jobs take beside each other than in their trials, where devices share a machine's cores."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from saturn_airflow.model.cluster import Cluster
from saturn_airflow.model.core_use import CoreUse, seconds_besides
from saturn_airflow.model.estimates import Estimate

_SECONDS = ("launch_seconds", "setup_seconds", "seconds_per_batch", "evaluation_seconds")


def crowded(
    measured: Sequence[tuple[Estimate, CoreUse | None]], cluster: Cluster, jobs: int
) -> list[Estimate]:
    """What this sweep measured, as it is on machines whose devices are all busy.

    :param measured: each with what the machine's cores did meanwhile.
    :param jobs: of the sweep: no more than these run at once.
    """
    uses = [use for _, use in measured if use is not None]
    machines = {use.node: use.machine for use in uses}
    besides = {
        machine: seconds_besides([use for use in uses if use.machine == machine])
        for machine in set(machines.values())
    }
    found = []
    for estimate, use in measured:
        if use is None or not estimate.works:
            found.append(estimate)
            continue
        there = [node for node in cluster if machines.get(node.name) == use.machine]
        cores = {core for other in uses if other.machine == use.machine for core in other.cores}
        busy = min(sum(node.devices for node in there), estimate.devices * jobs)
        # A device's part of the cores, while all are busy.
        part = len(cores) / max(busy, estimate.devices)
        share = use.of_rank / part
        fields: dict[str, Any] = {name: getattr(estimate, name) * max(1.0, share) for name in _SECONDS}
        fields["core_share"] = min(1.0, share)
        fields["besides_seconds"] = besides[use.machine] / (part * estimate.devices)
        found.append(dataclasses.replace(estimate, **fields))
    return found
