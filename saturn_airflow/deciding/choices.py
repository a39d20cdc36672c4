"""What each job could have run under, and why it does not: for the pages, and for those left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from saturn_airflow.model import guards
from saturn_airflow.model.cluster import Cluster
from saturn_airflow.model.estimates import Estimate, Key
from saturn_airflow.model.jobs import Job
from saturn_airflow.model.plan import Plan
from saturn_airflow.model.problem import Problem
from saturn_airflow.profiling.fingerprints import fingerprint
from saturn_airflow.profiling.host_parts import NOTHING_SEEN, HostBytes, too_large_for_hosts
from saturn_airflow.profiling.options import Estimates, by_key, refusal, total_batches

#: What is shown of an estimate beside a job's plan.
_SHOWN = (
    *("technique", "devices", "kind", "seconds_per_batch", "spread", "uncertainty", "setup_seconds"),
    *("peak_device_bytes", "source", "observed_at"),
)


def choices(
    problem: Problem,
    plan: Plan,
    jobs: Mapping[str, Job],
    estimates: Estimates,
    refusals: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """For each planned job what it could have run under, with what is known of that, and why it does not.

    :param problem: what the plan is for, with the seconds that it was made with.
    """
    from saturn_airflow.planning.presenting.explaining import explain

    kinds = {node.name: node.kind for node in problem.nodes}
    seconds = {(job.name, o.technique, o.devices): o.seconds for job in problem.jobs for o in job.options}
    found = {}
    for reason in explain(problem, plan).reasons:
        a = reason.assignment
        mark = fingerprint(jobs[a.job])
        chosen = Key(mark, a.technique, a.devices, kinds[a.node])
        makespans = {(other.technique, other.devices): other.makespan for other in reason.alternatives}
        options = [
            {
                **{name: getattr(e, name) for name in _SHOWN},
                "reason": e.reason or refusal(jobs[a.job], e),
                "verdict": _verdict(jobs[a.job], e),
                "seconds": seconds.get((a.job, e.technique, e.devices), {}).get(e.kind),
                "makespan": plan.makespan if key == chosen else makespans.get((e.technique, e.devices)),
                "chosen": key == chosen,
            }
            for key, e in sorted(estimates.items(), key=lambda item: item[0][1:])
            if key.fingerprint == mark
        ]
        refused = [dict(r) for r in refusals if r["fingerprint"] == mark]
        found[a.job] = {"why": reason.text, "options": options, "refused": refused}
    return found


def _verdict(job: Job, estimate: Estimate) -> str:
    """How a strategy trains ``job`` next to one device, in words."""
    if estimate.technique in job.trust:
        return guards.in_words(guards.TRUSTED)
    return guards.in_words(estimate.verdicts.get(guards.mark(job, estimate.version)))


def why_nowhere(
    job: Job,
    found: Sequence[Estimate],
    refusals: Sequence[Mapping[str, Any]],
    profile: str = "auto",
    cluster: Cluster | None = None,
    memory: HostBytes = NOTHING_SEEN,
) -> str:
    """Why no strategy trains ``job``, in the words of each technique.

    :param cluster: the nodes whose memory is looked at.
    :param memory: bytes that jobs may have on them, as far as that was seen.
    """
    mark = fingerprint(job)
    own = [estimate for estimate in found if estimate.fingerprint == mark]
    works = [e for e in own if e.reason is None and (job.techniques is None or e.technique in job.techniques)]
    refused = [(e.technique, e.devices, reason) for e in works if (reason := refusal(job, e))]
    works = [e for e in works if not refusal(job, e)]
    if cluster is not None:
        large = {e.key: why for e in works if (why := too_large_for_hosts(job, e, cluster, memory))}
        refused += [(key.technique, key.devices, why) for key, why in large.items()]
        works = [e for e in works if e.key not in large]
    if works and total_batches(job, by_key(*own)) is None:
        return (
            "its data has no length, so nobody knows how long its epochs take: give the dataset a __len__ "
            "(its samples), or say how long to train with hparams=HParams(batches=...)"
        )
    tried = refused + [(e.technique, e.devices, e.reason) for e in own if e.reason]
    tried += [(r["technique"], r["devices"], r["reason"]) for r in refusals if r["fingerprint"] == mark]
    reasons = "; ".join(f"{technique} x {devices}: {reason}" for technique, devices, reason in tried)
    if works:
        reasons = "; ".join(
            filter(None, [reasons, "what works needs more devices than the job's nodes have"])
        )
    if profile == "never" and not own:
        return "nothing is known of how fast it trains, and profile='never' lets nothing be measured"
    return "no strategy can train it. " + (reasons or "None was measured; see the logs of the profile tasks")
