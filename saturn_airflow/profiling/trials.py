"""Which trials a sweep needs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from saturn_airflow import library
from saturn_airflow.cluster import Cluster, Node
from saturn_airflow.estimates import Estimate, Trial
from saturn_airflow.jobs import Job
from saturn_airflow.profiling.fingerprints import fingerprint


@dataclass(frozen=True)
class Refusal:
    """A technique that says why it can't train a job on a number of devices."""

    fingerprint: str
    technique: str
    devices: int
    kind: str
    reason: str


def device_counts(node: Node) -> list[int]:
    """Numbers of devices worth trying on ``node``: the powers of two, and all it has."""
    powers = [2**i for i in range(node.devices.bit_length()) if 2**i <= node.devices]
    return sorted({*powers, node.devices})


def needed_trials(
    jobs: Sequence[Job],
    cluster: Cluster,
    techniques: Sequence[str] | None = None,
    known: Collection[Estimate] = (),
) -> tuple[list[Trial], list[Refusal], list[Estimate]]:
    """List the trials that measure every strategy of every job once per kind of device.

    Jobs with one fingerprint share a trial; what ``known`` already holds is not measured again. Trials of
    one kind are dealt out to its nodes evenly by devices, the widest first.

    Returns the trials, what techniques refuse, and the part of ``known`` that this sweep can use.

    :param techniques: names to try; None for the whole library. A job's own ``techniques`` narrow it.
    :raises saturn_airflow.errors.InvalidSweepError: for a technique that is not in the library.
    """
    names = list(techniques) if techniques is not None else library.names()
    library.check_names(names, "the sweep")
    alike: dict[tuple[str, tuple[str, ...] | None, tuple[str, ...] | None], list[Job]] = {}
    for job in jobs:
        key = (
            fingerprint(job),
            tuple(job.techniques) if job.techniques is not None else None,
            tuple(job.nodes) if job.nodes is not None else None,
        )
        alike.setdefault(key, []).append(job)

    have = {(e.fingerprint, e.technique, e.devices, e.kind): e for e in known}
    used: dict[tuple[str, str, int, str], Estimate] = {}
    wanted: dict[tuple[str, str, int, str], tuple[dict[str, Job], dict[str, Node]]] = {}
    refusals: list[Refusal] = []
    for (mark, own_names, own_nodes), group in alike.items():
        for name in names if own_names is None else [n for n in own_names if n in names]:
            technique = library.get(name)
            for node in cluster:
                if own_nodes is not None and node.name not in own_nodes:
                    continue
                for count in device_counts(node):
                    key_of_trial = (mark, name, count, node.kind)
                    if key_of_trial in have:
                        used[key_of_trial] = have[key_of_trial]
                        continue
                    if reason := technique.why_not(group[0], count):
                        refusals.append(Refusal(*key_of_trial, reason))
                        continue
                    sharing, nodes = wanted.setdefault(key_of_trial, ({}, {}))
                    sharing.update((job.name, job) for job in group)
                    nodes[node.name] = node

    load = {node.name: 0.0 for node in cluster}
    trials: list[Trial] = []
    for (mark, name, count, _), (sharing, nodes) in sorted(wanted.items(), key=lambda item: -item[0][2]):
        node = min(nodes.values(), key=lambda n: load[n.name])
        load[node.name] += count / node.devices
        trials.append(
            Trial(
                job=next(iter(sharing.values())),
                technique=name,
                devices=count,
                node=node.name,
                covers=tuple(sharing),
                fingerprint=mark,
            )
        )
    return trials, list(dict.fromkeys(refusals)), list(used.values())
