"""What it is worth that plans know of each other: sweeps that arrive over days at one cluster, on paper.

    python benchmarks/arrivals.py [--seed N ...] [--sweeps 500] [--loads 0.5 0.7 0.9] [--out FILE]
    python benchmarks/arrivals.py --quick               # 40 sweeps at a load of 0.7
    python benchmarks/arrivals.py --stay                # no job gives way
    python benchmarks/arrivals.py --table               # print the results there are, run nothing

Load is the least device-seconds of what arrives over what 4 nodes of 8 devices have. Rules: ``ours``;
``first_planned`` (each sweep planned alone for all devices, first planned, first served);
``backfilling`` (first come first served with EASY backfilling on fixed numbers of devices; of several ways to
choose the numbers, the best for the mean counts); ``shortest_work`` (least remaining work first, likewise);
``bound`` (what nobody can beat, whatever is known). Urgent sweeps go first under all but ``first_planned``.
``estimates_off`` is the same with estimates 20% off; ``replanning`` the time to plan 30 sweeps with 300 jobs.
With several seeds, figures are means over seeds, and worst stretches the worst.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from arriving import peers, workload
from machine import describe

from saturn_airflow.model.sharing import SharedCluster, SharedSweep, SharingRules
from saturn_airflow.sharing.forecast import plan_together
from saturn_airflow.sharing.replay import Arrival, Decide, Replay, replay
from saturn_airflow.sharing.turns import decide

RESULTS = Path(__file__).parent / "results" / "arrivals.json"
#: How wide jobs of peers are: by the least share of the thriftiest strategy's efficiency.
CHOICES = {"thriftiest": 1.0, "three quarters": 0.75, "half": 0.5}
RULES = ("ours", "first_planned", "backfilling", "shortest_work", "bound")
OFF = 0.2
#: Teams have equal shares.
SHARING = SharingRules(shares={"vision": 0.5, "text": 0.5})


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, nargs="+", default=[0], metavar="N")
    parser.add_argument("--sweeps", type=int, default=500, metavar="N")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.7, 0.9])
    parser.add_argument("--quick", action="store_true", help="40 sweeps at a load of 0.7, exact estimates")
    parser.add_argument("--stay", action="store_true", help="no job gives way (without ``preempt``)")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), metavar="N")
    parser.add_argument("--out", type=Path, help="where to write the results (JSON)")
    parser.add_argument(
        "--only", nargs="+", choices=RULES, help="measure these rules anew, keep what --out has of the others"
    )
    parser.add_argument("--table", action="store_true", help="print the results there are, run nothing")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    if args.table:
        print(table(json.loads((args.out or RESULTS).read_text())))
        return 0
    number, loads = (40, [0.7]) if args.quick else (args.sweeps, args.loads)
    asked = [
        (number, load, seed, off, rule)
        for off in ((0.0,) if args.quick else (0.0, OFF))
        for load in loads
        for seed in args.seed
        for rule in RULES
        if not (off and rule == "bound")
    ]
    kept: dict[Any, dict[str, Any]] = {}
    if args.only:
        for row in json.loads(args.out.read_text())["by_seed"]:
            key = (number, *(row.pop(name) for name in ("load", "seed", "estimates_off", "rule")))
            if key[-1] not in args.only:
                kept[key] = row
    anew = [key for key in asked if key not in kept]
    with ProcessPoolExecutor(args.processes) as pool:
        figures = kept | dict(
            zip(anew, pool.map(functools.partial(measure, stay=args.stay), anew), strict=True)
        )

    def over_seeds(load: float, off: float) -> dict[str, Any]:
        keys = [key for key in figures if (key[1], key[3]) == (load, off)]
        return {
            rule: joined([figures[key] for key in keys if key[4] == rule])
            for rule in RULES
            if any(key[4] == rule for key in keys)
        }

    found: dict[str, Any] = {
        "machine": describe(),
        "sweeps": number,
        "seeds": args.seed,
        "nobody_gives_way": args.stay,
        "loads": {str(load): over_seeds(load, 0.0) for load in loads},
    }
    if not args.quick:
        found["estimates_off"] = {str(load): over_seeds(load, OFF) for load in loads}
        found["by_seed"] = [
            {"load": load, "seed": seed, "estimates_off": off, "rule": rule, **figures[key]}
            for key in asked
            for _, load, seed, off, rule in [key]
        ]
    found["replanning"] = replanning()
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))
    return 0


def measure(asked: tuple[int, float, int, float, str], stay: bool = False) -> dict[str, Any]:
    """The figures of one rule."""
    number, load, seed, off, rule = asked
    sweeps = workload.sweeps(number, load, seed, preempt=not stay)
    if rule == "bound":
        alone = sorted(sweep.alone for sweep in sweeps)
        devices = sum(node.devices for node in workload.NODES)
        return {
            "mean_completion": peers.least_mean(sweeps, devices),
            "p95_completion": percentile(alone, 0.95),
            "worst_stretch": 1.0,
            "busy": None,
        }
    begun = time.process_time()
    if rule == "ours":
        return {**run(sweeps, off, seed, decide), "cpu_seconds": time.process_time() - begun}
    if rule == "first_planned":
        return run(sweeps, off, seed, peers.first_planned(0.1))
    of = {
        name: run(
            sweeps,
            off,
            seed,
            peers.backfilling(peers.efficient(least), shortest_work=rule == "shortest_work"),
        )
        for name, least in CHOICES.items()
    }
    best = min(of, key=lambda name: of[name]["mean_completion"])
    return {**of[best], "devices": best}


def run(sweeps: list[SharedSweep], off: float, seed: int, by: Decide) -> dict[str, Any]:
    """The figures of one rule under one choice of devices."""
    arrivals = [workload.with_errors(s, off, seed) if off else Arrival(s) for s in sweeps]
    return figures_of(sweeps, replay(arrivals, workload.NODES, SHARING, by=by))


def figures_of(sweeps: list[SharedSweep], found: Replay) -> dict[str, Any]:
    """Seconds; stretches are over what a sweep would take alone at the least, by the estimates."""
    begun: dict[str, float] = {}
    for ran in found.ran:
        begun[ran.sweep] = min(ran.start, begun.get(ran.sweep, ran.start))
    completions = sorted(found.done[s.name] - s.arrived for s in sweeps)
    waits = sorted(begun[s.name] - s.arrived for s in sweeps)
    stretches = [(found.done[s.name] - s.arrived) / s.alone for s in sweeps]
    urgent = [found.done[s.name] - s.arrived for s in sweeps if s.priority]
    held = sum(ran.place.devices * (ran.end - ran.start) for ran in found.ran)
    span = max(found.done.values()) - min(s.arrived for s in sweeps)
    return {
        "mean_completion": statistics.mean(completions),
        "p95_completion": percentile(completions, 0.95),
        "mean_wait": statistics.mean(waits),
        "p95_wait": percentile(waits, 0.95),
        "mean_stretch": statistics.mean(stretches),
        "worst_stretch": max(stretches),
        "busy": held / span / sum(node.devices for node in workload.NODES),
        "urgent_mean_completion": statistics.mean(urgent) if urgent else None,
        "stops": found.stops,
    }


def percentile(ordered: list[float], share: float) -> float:
    """The least value that is not below this share of all."""
    return ordered[math.ceil(share * len(ordered)) - 1]


def joined(figures: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over seeds; the worst of what is called worst."""
    found: dict[str, Any] = {}
    for key in figures[0]:
        values = [one[key] for one in figures if one.get(key) is not None]
        if not values:
            found[key] = None
        elif isinstance(values[0], str):
            found[key] = ", ".join(sorted(set(values)))
        else:
            found[key] = max(values) if key.startswith("worst") else statistics.mean(values)
    return found


def replanning() -> dict[str, Any]:
    """Seconds of one core to plan 30 sweeps with 300 jobs together: what runs next, and when all ends."""
    sweeps: list[SharedSweep] = []
    drawn = iter(workload.sweeps(400, 0.7, 99))
    while len(sweeps) < 30:
        sweep = next(drawn)
        if len(sweep.jobs) >= 10:
            sweeps.append(dataclasses.replace(sweep, jobs=sweep.jobs[:10], arrived=0.0))
    cluster = SharedCluster(0.0, workload.NODES, tuple(sweeps))
    begun = time.process_time()
    decide(cluster, SHARING)
    decided = time.process_time() - begun
    begun = time.process_time()
    plan = plan_together(cluster, SHARING)
    return {
        "sweeps": len(sweeps),
        "jobs": len(plan.jobs),
        "decide_seconds": decided,
        "plan_seconds": time.process_time() - begun,
    }


def table(found: dict[str, Any]) -> str:
    """The results as a table: hours."""
    lines = [
        "| estimates | load | rule | mean | p95 | mean wait | worst stretch | busy | mean of ours over it |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for part, word in (("loads", "exact"), ("estimates_off", "20% off")):
        for load, rules in found.get(part, {}).items():
            for rule, of in rules.items():
                wait, busy = of.get("mean_wait"), of.get("busy")
                less = rules["ours"]["mean_completion"] / of["mean_completion"] - 1
                name = rule.replace("_", " ") + (f" ({of['devices']})" if of.get("devices") else "")
                lines.append(
                    f"| {word} | {load} | {name} | {of['mean_completion'] / 3600:.2f} | "
                    f"{of['p95_completion'] / 3600:.2f} | "
                    f"{'-' if wait is None else f'{wait / 3600:.2f}'} | {of['worst_stretch']:.1f} | "
                    f"{'-' if busy is None else f'{busy:.0%}'} | {'' if rule == 'ours' else f'{less:+.0%}'} |"
                )
    plan = found["replanning"]
    lines.append(
        f"\nPlanning {plan['sweeps']} sweeps with {plan['jobs']} jobs together: {plan['plan_seconds']:.1f} s "
        f"of one core; deciding what runs next: {plan['decide_seconds'] * 1000:.0f} ms."
    )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
