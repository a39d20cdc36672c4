"""Checks a plan against its problem, from the two JSON files alone: it shares no code with the planner.

python benchmarks/plan_checker.py PROBLEM.json PLAN.json
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

RELATIVE_TOLERANCE = 1e-6


def faults(problem: dict[str, Any], plan: dict[str, Any]) -> list[str]:
    """What is wrong with ``plan``, in words; empty when it is valid."""
    found: list[str] = []
    nodes = {node["name"]: node for node in problem["nodes"]}
    jobs = {job["name"]: job for job in problem["jobs"]}
    assigned = plan["assignments"]
    slack = RELATIVE_TOLERANCE * max(plan["makespan"], 1.0)
    times_named = Counter(a["job"] for a in assigned)
    found += [f"{name} is assigned {times_named[name]} times" for name in jobs if times_named[name] != 1]
    found += [f"{name} is no job of the problem" for name in times_named if name not in jobs]
    found += [f"{a['node']} is no node" for a in assigned if a["node"] not in nodes]
    if found:
        return found
    for a in assigned:
        job, node = jobs[a["job"]], nodes[a["node"]]
        ids = a["device_ids"]
        if len(ids) != a["devices"] or len(set(ids)) != len(ids):
            found.append(f"{a['job']}: {ids} are not {a['devices']} devices")
        if any(device not in range(node["devices"]) for device in ids):
            found.append(f"{a['job']}: {ids} are not all on {a['node']}")
        if any(a["start"] < at - slack for device, at in enumerate(node.get("free", [])) if device in ids):
            found.append(f"{a['job']} starts on {a['node']} before its devices are free")
        if job.get("nodes") and a["node"] not in job["nodes"]:
            found.append(f"{a['job']} may not run on {a['node']}")
        if a["start"] < job.get("release", 0.0) - slack:
            found.append(f"{a['job']} starts before its release")
        strategies = [
            s["seconds"][node["kind"]]
            for s in job["strategies"]
            if (s["technique"], s["devices"]) == (a["technique"], a["devices"])
            and node["kind"] in s["seconds"]
        ]
        if not any(abs(a["end"] - a["start"] - seconds) <= slack for seconds in strategies):
            found.append(
                f"{a['job']}: {a['end'] - a['start']} s is not what {a['technique']} x {a['devices']} takes"
            )
    # Sweep over time: at each moment a device belongs to one job at most.
    events = sorted(
        [(a["end"] - slack / 2, 0, a) for a in assigned] + [(a["start"] + slack / 2, 1, a) for a in assigned],
        key=lambda event: event[:2],
    )
    held: dict[tuple[str, int], str] = {}
    for _, begins, a in events:
        for device in a["device_ids"]:
            place = (a["node"], device)
            if begins and place in held:
                found.append(f"{a['job']} and {held[place]} share {a['node']} device {device}")
            elif begins:
                held[place] = a["job"]
            elif held.get(place) == a["job"]:
                del held[place]
    last = max(a["end"] for a in assigned)
    if abs(last - plan["makespan"]) > slack:
        found.append(f"the makespan is {plan['makespan']}, the last job ends at {last}")
    if plan["lower_bound"] > plan["makespan"] + slack:
        found.append(f"the bound {plan['lower_bound']} is above the makespan {plan['makespan']}")
    return found


if __name__ == "__main__":
    wrong = faults(*(json.loads(Path(path).read_text()) for path in sys.argv[1:3]))
    sys.exit("\n".join(wrong) or 0)
