"""What rounds win, on paper: makespan over that of a plan by one who knows what jobs will take.

    python benchmarks/rounds.py [--instances NAME ...] [--seeds 20] [--shapes job mixed] [--processes 2]
    python benchmarks/rounds.py --cases exact lost halving
    python benchmarks/rounds.py --table

Cases: ``noise`` (estimates off by 20%: 1, 2, 4, 8 rounds; without foresight; without learning; upstream's
rule), ``exact`` (right estimates), ``lost`` (a node is lost at half time), ``halving`` (24 jobs, of which
halves are dropped). All are repeatable: searches count steps, not seconds. Results are merged into
``benchmarks/results/rounds.json``; runs of one (instance, shape, case) that are there already are left out
unless ``--again`` is given, so that it can be run in parts. Seeds are shared out among processes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path
from typing import Any

from machine import describe

from saturn_airflow.model.problem import Problem
from saturn_airflow.model.rounds import Rounds
from saturn_airflow.model.selection import MedianStopping, SuccessiveHalving
from saturn_airflow.planning.online.simulation import NodeLoss, Simulation, clairvoyant, simulate

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "rounds.json"
PAPER = ["txt-1x8", "txt-2x8", "img-1x8", "img-2x8"]
EFFORT = 0.2
#: Of the Saturn paper: every 1000 s, when 500 s are won.
UPSTREAM: dict[str, Any] = {
    "rounds": Rounds(most=100, every_minutes=1000 / 60),
    "least_win": 0.0,
    "least_seconds": 500.0,
    "learn": False,
    "foresight": False,
    "time_limit": 0.1,
}
NOTE = "repeatable: ratios do not depend on the machine, nor on what else it did; wall_seconds do"
T95 = {10: 2.262, 20: 2.093, 30: 2.045, 40: 2.023}

Run = Callable[[Problem, int, str], tuple[Simulation, float]]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--instances", nargs="*", default=PAPER)
    parser.add_argument("--shapes", nargs="*", default=["job"], help="what errors have in common: job, mixed")
    parser.add_argument("--cases", nargs="*", default=["noise", "exact", "lost", "halving"])
    parser.add_argument("--seeds", type=int, default=20, choices=sorted(T95))
    parser.add_argument("--processes", type=int, default=os.cpu_count(), metavar="N")
    parser.add_argument("--hows", nargs="*", help="only these rows of a case, such as '4 rounds'")
    parser.add_argument("--stop-after", type=float, default=float("inf"), metavar="S")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--table", action="store_true", help="print the results there are, run nothing")
    args = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": []}
    if args.table:
        print(table(results["rows"]))
        return 0
    results["machine"] = {**describe(), "note": NOTE}
    # A seed always goes to the same process, which remembers the clairvoyant's makespan for it.
    workers = [ProcessPoolExecutor(1) for _ in range(args.processes)]
    stop_at = time.monotonic() + args.stop_after
    for case in args.cases:
        for name in args.instances:
            for shape in args.shapes:
                for how in args.hows or runs(case):
                    key = {"case": case, "instance": name, "shape": shape, "how": how}
                    old = [r for r in results["rows"] if {k: r[k] for k in key} == key]
                    alone = case == "lost" and name.endswith("1x8")
                    if (old and not args.again) or alone or how not in runs(case):
                        continue
                    if time.monotonic() > stop_at:
                        return 3
                    row = {**key, **measure(workers, key, args.seeds)}
                    print(json.dumps(row), flush=True)
                    results["rows"] = [r for r in results["rows"] if r not in old] + [row]
                    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    return 0


def runs(case: str) -> dict[str, Run]:
    """The ways that a case compares."""
    ways: dict[str, dict[str, Any]] = {"one shot": {"rounds": Rounds(most=1)}}
    ways |= {f"{k} rounds": {"rounds": Rounds(most=k)} for k in ((2, 4, 8) if case == "noise" else (4,))}
    noise, failures = 0.2, []
    if case == "noise":
        ways["4 rounds, no foresight"] = {"rounds": Rounds(most=4), "foresight": False}
        ways["4 rounds, no learning"] = {"rounds": Rounds(most=4), "learn": False}
        ways["4 rounds, when off by 5%"] = {"rounds": Rounds(most=4, off_by=0.05)}
        ways["upstream's rule"] = UPSTREAM
    elif case == "exact":
        noise = 0.0
        ways["4 rounds, no foresight"] = {"rounds": Rounds(most=4), "foresight": False}
    elif case == "lost":
        failures = [NodeLoss("node00", 0.5)]
        ways["upstream's rule"] = UPSTREAM
    else:
        ways = {
            "one shot": {"rounds": Rounds(most=1)},
            "halving, 4 rounds": {"rounds": Rounds(most=4), "selection": SuccessiveHalving()},
            "median, 8 rounds": {"rounds": Rounds(most=8, share=0.25), "selection": MedianStopping()},
        }

    def way(settings: dict[str, Any]) -> Run:
        def run(problem: Problem, seed: int, shape: str) -> tuple[Simulation, float]:
            if case == "halving":
                problem = doubled(problem)
            same: dict[str, Any] = {"noise": noise, "seed": seed, "shape": shape}
            found = simulate(problem, failures=failures, **{"time_limit": EFFORT, **same, **settings})
            return found, known(problem, **same)

        return run

    return {how: way(settings) for how, settings in ways.items()}


_known: dict[tuple[Any, ...], float] = {}


def known(problem: Problem, noise: float, seed: int, shape: Any) -> float:
    """The makespan of the clairvoyant's plan."""
    key = (problem.name, len(problem.jobs), noise, seed, shape)
    if key not in _known:
        _known[key] = clairvoyant(problem, noise=noise, seed=seed, shape=shape)
    return _known[key]


def doubled(problem: Problem) -> Problem:
    """Each job twice."""
    jobs = [dataclasses.replace(job, name=f"{job.name}-{n}") for job in problem.jobs for n in (1, 2)]
    return dataclasses.replace(problem, jobs=tuple(jobs))


def read(name: str) -> Problem:
    """A problem of ``instances/``."""
    return Problem.read(HERE / "instances" / f"{name}.json")


def once(case: str, instance: str, shape: str, how: str, seed: int) -> tuple[Simulation, float]:
    """One simulation, and the makespan of the clairvoyant's plan."""
    return runs(case)[how](read(instance), seed, shape)


def measure(workers: Sequence[Executor], key: dict[str, str], seeds: int) -> dict[str, Any]:
    """Mean, 95% confidence interval (Student's t) and worst of the ratios, over seeds."""
    started = time.monotonic()
    futures = [workers[seed % len(workers)].submit(once, **key, seed=seed) for seed in range(seeds)]
    found = [future.result() for future in futures]
    ratios = [simulation.makespan / known for simulation, known in found]
    return {
        "seeds": seeds,
        "ratio": round(statistics.fmean(ratios), 4),
        "half_interval": round(T95[seeds] * statistics.stdev(ratios) / seeds**0.5, 4),
        "worst": round(max(ratios), 4),
        "moves": round(statistics.fmean(s.moves for s, _ in found), 1),
        "dropped": round(statistics.fmean(len(s.pruned) for s, _ in found), 1),
        "wall_seconds": round(time.monotonic() - started, 1),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The results as a Markdown table, an instance a column."""
    names = list(dict.fromkeys(row["instance"] for row in rows))
    lines = ["| case | errors | how | " + " | ".join(names) + " |", "| --- " * (3 + len(names)) + "|"]
    for case, shape, how in dict.fromkeys((r["case"], r["shape"], r["how"]) for r in rows):
        cells = []
        for name in names:
            own = [
                r
                for r in rows
                if (r["case"], r["shape"], r["how"], r["instance"]) == (case, shape, how, name)
            ]
            cells.append(f"{own[0]['ratio']:.3f} ± {own[0]['half_interval']:.3f}" if own else "-")
        lines.append(f"| {case} | {shape} | {how} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
