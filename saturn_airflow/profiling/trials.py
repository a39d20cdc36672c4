"""Which strategies there are to measure, and the trials that measure them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from saturn_airflow import library
from saturn_airflow.model.cluster import Cluster, Node
from saturn_airflow.model.estimates import Key, Trial
from saturn_airflow.model.jobs import Job
from saturn_airflow.profiling.fingerprints import fingerprint

_NOT_NAMED = (
    "a technique of your own is tried where the sweep's or the job's techniques= name it, or where it has a "
    "why_not, which says what it can't train"
)


@dataclass(frozen=True)
class Refusal:
    """A technique that says why it can't train a job on a number of devices."""

    fingerprint: str
    technique: str
    devices: int
    kind: str
    reason: str


@dataclass
class Candidate:
    """A strategy that could be measured: the jobs it is for, and the nodes that could do it.

    :param jobs: by name; they share a fingerprint.
    :param nodes: by name.
    :param version: of the technique.
    :param spares_memory: whether it gives speed for memory.
    """

    jobs: dict[str, Job] = field(default_factory=dict)
    nodes: dict[str, Node] = field(default_factory=dict)
    version: str = "1"
    spares_memory: bool = False


Strategies = Mapping[Key, Candidate]


def device_counts(node: Node) -> list[int]:
    """Numbers of devices worth trying on ``node``: the powers of two, and all it has."""
    powers = [2**i for i in range(node.devices.bit_length()) if 2**i <= node.devices]
    return sorted({*powers, node.devices})


def strategies(
    jobs: Sequence[Job],
    cluster: Cluster,
    techniques: Sequence[str] | None = None,
    counts: Callable[[Node], Collection[int]] = device_counts,
) -> tuple[dict[Key, Candidate], list[Refusal]]:
    """All strategies of all jobs, once per fingerprint and kind of device, and what techniques refuse.

    :param techniques: names to try; None for the whole library. A job's own ``techniques`` narrow it.
    :param counts: the numbers of devices to try on a node.
    :raises saturn_airflow.model.errors.InvalidSweepError: for a technique that is not in the library.
    """
    names = list(techniques) if techniques is not None else library.names()
    unasked = [] if techniques is not None else [n for n in names if not library.says_what_it_trains(n)]
    library.check_names(names, "the sweep")
    alike: dict[tuple[str, tuple[str, ...] | None, tuple[str, ...] | None], list[Job]] = {}
    for job in jobs:
        own_techniques = tuple(job.techniques) if job.techniques is not None else None
        own_nodes = tuple(job.nodes) if job.nodes is not None else None
        alike.setdefault((fingerprint(job), own_techniques, own_nodes), []).append(job)
    found: dict[Key, Candidate] = {}
    refusals: dict[Refusal, None] = {}
    for (mark, own_techniques, own_nodes), group in alike.items():
        for name in names if own_techniques is None else [n for n in own_techniques if n in names]:
            unwanted = _NOT_NAMED if own_techniques is None and name in unasked else None
            technique = library.get(name)
            for node in cluster:
                if own_nodes is not None and node.name not in own_nodes:
                    continue
                for count in counts(node):
                    key = Key(mark, name, count, node.kind)
                    if reason := unwanted or library.why_not(technique, group[0], count):
                        refusals[Refusal(*key, reason)] = None
                        continue
                    candidate = found.setdefault(
                        key, Candidate(version=technique.version, spares_memory=technique.spares_memory({}))
                    )
                    candidate.jobs.update((job.name, job) for job in group)
                    candidate.nodes[node.name] = node
    return found, list(refusals)


def trials_of(keys: Collection[Key], among: Strategies, broken: Collection[str] = ()) -> list[Trial]:
    """The trials that measure ``keys``, dealt out to the nodes evenly, the longest (the widest) first.

    :param broken: names of jobs that can't be trained, so that nothing is measured with or for them.
    """
    load: dict[str, float] = {}
    trials: list[Trial] = []
    for key in sorted(keys, key=lambda key: -key.devices):
        candidate = among[key]
        jobs = [job for job in candidate.jobs.values() if job.name not in broken]
        node = min(candidate.nodes.values(), key=lambda node: load.get(node.name, 0.0))
        load[node.name] = load.get(node.name, 0.0) + key.devices / node.devices
        trials.append(
            Trial(
                job=jobs[0],
                technique=key.technique,
                devices=key.devices,
                node=node.name,
                covers=tuple(job.name for job in jobs),
                fingerprint=key.fingerprint,
                version=candidate.version,
            )
        )
    return trials
