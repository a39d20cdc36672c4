"""Whether strategies keep to their devices' part of a node's memory: no plan takes more than there is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from saturn_airflow.model.cluster import Cluster, Node
from saturn_airflow.model.estimates import Estimate
from saturn_airflow.model.jobs import Job

#: By the names of nodes, the bytes that jobs may have on them, as far as that was learned.
HostBytes = Mapping[str, float]
NOTHING_SEEN: HostBytes = MappingProxyType({})


def within_hosts(
    job: Job, estimates: Sequence[Estimate], cluster: Cluster, memory: HostBytes
) -> list[Estimate]:
    """Those of a job's strategies that keep to their devices' part of the nodes' memory.

    Where none does, those that a node whose memory was learned can hold while its other jobs take little: a
    job that would train is not lost to a rule that nobody asked for, and each run's supervisor looks at what
    is left.
    """
    within = [e for e in estimates if not beyond_part(job, e, cluster, memory)]
    return within or [e for e in estimates if not too_large_for_hosts(job, e, cluster, memory)]


def too_large_for_hosts(job: Job, estimate: Estimate, cluster: Cluster, memory: HostBytes) -> str | None:
    """Why no node can be trusted with a strategy; None where one can.

    It takes more than its devices' part of what the node is said to have, or more than all that was learned
    of it.
    """
    return _beyond(job, estimate, cluster, memory, alone=True)


def beyond_part(job: Job, estimate: Estimate, cluster: Cluster, memory: HostBytes) -> str | None:
    """Why a strategy takes more of a node's memory than its devices' part; None where it does not.

    Where each run keeps to the part of its devices, no plan of any jobs takes more than there is, since none
    gives a device to two. Of nodes of one kind the one with the least counts, for a plan may take any.
    """
    return _beyond(job, estimate, cluster, memory, alone=False)


def _beyond(job: Job, estimate: Estimate, cluster: Cluster, memory: HostBytes, alone: bool) -> str | None:
    nodes = [
        node
        for node in cluster
        if node.kind == estimate.kind
        and (node.host_memory is not None or node.name in memory)
        and estimate.devices <= node.devices
        and (not job.nodes or node.name in job.nodes)
    ]
    parts = {_part(node, estimate.devices, memory, alone): node for node in nodes}
    needs: float = estimate.peak_host_bytes
    if alone and estimate.devices > 1:
        # Ranks count what they share once each. It ran on a node of this kind, so it did not take more.
        there = [memory[node.name] for node in cluster if node.kind == estimate.kind and node.name in memory]
        needs = min(needs, max(there, default=needs))
    if not parts or needs <= min(parts):
        return None
    node, most = parts[min(parts)], min(parts) / 2**30
    took = f"it took {estimate.peak_host_bytes / 2**30:.1f} GiB of host memory, and "
    if alone and node.host_memory is None:
        return (
            f"{took}node {node.name!r} has {most:.1f} GiB for all its jobs; keep the job to nodes with more "
            "(Job(nodes=...)), or say what its jobs may have with Node(host_memory=...)"
        )
    return (
        f"{took}its devices' part of node {node.name!r} is {most:.1f} GiB; let it use more devices, or other "
        "nodes (Job(nodes=...)), or give the node's jobs more with Node(host_memory=...)"
    )


def _part(node: Node, devices: int, memory: HostBytes, alone: bool) -> float:
    """Bytes that a strategy may take on a node; ``alone``: if no other ran where its memory was learned."""
    share = devices / node.devices
    if node.host_memory is not None:
        return node.host_memory * 2**30 * share
    return memory[node.name] * (1 if alone else share)
