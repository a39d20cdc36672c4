"""Whether promises with odds are kept as often as they say, on paper.

    python benchmarks/promises.py [--clusters 2000] [--seed 0] [--out FILE]

Each simulated cluster (2 nodes of 4 devices, two sweeps at once) has a law of errors of its own: how far
estimates are off, and how much of that a sweep, a job, a strategy shares, is drawn. Promises are made from
60 past errors of 12 other sweeps, and then the jobs take what the law says. Printed: the share of sweeps
that are done by the moment that was promised with 90%, with its 95% interval (Wilson), and how wide the
ranges from 10% to 90% are over those of one who knows the law (for every fifth cluster).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from machine import describe

from saturn_airflow.model.cluster import Node
from saturn_airflow.model.problem import Option, PlannedJob
from saturn_airflow.model.sharing import (
    SharedCluster,
    SharedJob,
    SharedSweep,
    SharingRules,
    least_seconds,
)
from saturn_airflow.sharing.error_law import ErrorLaw, PastError, fit
from saturn_airflow.sharing.odds import drawn_jobs, odds
from saturn_airflow.sharing.replay import replay

NODES = (Node("a", 4, "gpu"), Node("b", 4, "gpu"))
RULES = SharingRules()
CONFIDENCE = 0.9
SWEEPS, JOBS = 12, 5


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clusters", type=int, default=2000, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count(), metavar="N")
    parser.add_argument("--out", type=Path, help="where to write the results (JSON)")
    args = parser.parse_args()
    with ProcessPoolExecutor(args.processes) as pool:
        asked = [(args.seed, number) for number in range(args.clusters)]
        found = list(pool.map(promise, asked, chunksize=5))
    kept, number = sum(one[0] for one in found), len(found)
    low, high = wilson(kept, number)
    widths = [one[1] for one in found if one[1] is not None]
    result: dict[str, Any] = {
        "machine": describe(),
        "clusters": number,
        "seed": args.seed,
        "confidence": CONFIDENCE,
        "kept": kept / number,
        "kept_interval": [low, high],
        "median_width_over_known_law": statistics.median(widths) if widths else None,
        "mean_width_over_known_law": statistics.mean(widths) if widths else None,
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 0


def promise(asked: tuple[int, int]) -> tuple[bool, float | None]:
    """Whether one sweep is done when promised, and how much wider its range is than with the law known."""
    seed, number = asked
    chance = random.Random(f"promises {seed} {number}")
    off, of_sweep, of_job = chance.uniform(0.1, 0.35), chance.random(), chance.random()
    law = ErrorLaw(
        bias=chance.uniform(-0.1, 0.1),
        sweep=off * math.sqrt(of_sweep),
        job=off * math.sqrt((1 - of_sweep) * of_job),
        strategy=off * math.sqrt((1 - of_sweep) * (1 - of_job)),
    )
    past = []
    for sweep in range(SWEEPS):
        shared = law.bias + chance.gauss(0, law.sweep)
        for job in range(JOBS):
            log = shared + chance.gauss(0, law.job) + chance.gauss(0, law.strategy)
            past.append(PastError(f"p{sweep}", f"j{job}", math.exp(log)))
    sweeps = tuple(_sweep(f"s{i}", chance) for i in range(2))
    cluster = SharedCluster(0.0, NODES, sweeps)
    actual = {
        key: job for sweep in sweeps for key, job in drawn_jobs(sweep, law, frozenset(), chance).items()
    }
    done = replay((), NODES, RULES, begin=cluster, actual=actual).done["s0"]
    told = odds(cluster, RULES, fit(past), seed=number).sweeps["s0"]
    wider = None
    if number % 5 == 0:
        known = odds(cluster, RULES, law, seed=number).sweeps["s0"]
        wider = (told.by(0.9) - told.by(0.1)) / (known.by(0.9) - known.by(0.1))
    return done <= told.by(CONFIDENCE), wider


def _sweep(name: str, chance: random.Random) -> SharedSweep:
    jobs = []
    for j in range(chance.randint(1, 6)):
        work = chance.lognormvariate(7.5, 0.7)
        power = chance.uniform(0.5, 0.95)
        options = tuple(Option("t", k, {"gpu": 40 + work / k**power}, 40.0) for k in (1, 2, 4))
        jobs.append(PlannedJob(f"j{j}", options))
    alone = least_seconds(tuple(jobs), NODES)
    return SharedSweep(name, tuple(map(SharedJob, jobs)), 0.0, alone, preempt=True)


def wilson(kept: int, number: int) -> tuple[float, float]:
    """The 95% interval of a share (Wilson 1927)."""
    z, share = 1.96, kept / number
    middle = share + z * z / (2 * number)
    half = z * math.sqrt(share * (1 - share) / number + z * z / (4 * number * number))
    return (middle - half) / (1 + z * z / number), (middle + half) / (1 + z * z / number)


if __name__ == "__main__":
    raise SystemExit(main())
