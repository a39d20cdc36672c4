"""Whether promises with odds are kept as often as they say, on paper.

    python benchmarks/promises.py [--sweeps 2000] [--seed 0] [--processes N] [--out FILE]

Each simulated sweep (1 to 10 jobs on 2 nodes of 4 devices) has a law of errors of its own, of which a promise
knows nothing: how far estimates are off, how much of that the sweep, its nodes and its jobs share, how many
earlier errors there are (of 2 to 30 sweeps of 3 to 8 jobs), and by which of four distributions they come:
normal, with heavy tails (Student's t with 3 degrees of freedom), skewed (log of an exponential) and mixed
(each tenth draw is three times as far off), each with the same variance. Promises are made from the earlier
errors, and then the jobs take what the law says. Of each two sweeps one runs as it was planned, alone on its
nodes, and the other takes turns with a second one.

Printed: the share of sweeps that are done by the moment that was promised with 90%, with its 95% interval
(Wilson), and how wide the ranges from the expected end (the median) to that moment, and from 10% to 90%, are
over those of one who knows the law: for sums over each fifth pair of sweeps, so that sweeps with hardly any
error do not count more.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from machine import describe

from saturn_airflow.model.cluster import Node
from saturn_airflow.model.past_errors import PastError
from saturn_airflow.model.problem import Option, PlannedJob, Problem
from saturn_airflow.model.sharing import (
    SharedCluster,
    SharedJob,
    SharedSweep,
    SharingRules,
    least_seconds,
)
from saturn_airflow.planning.online.ends import Ends, at_pace, ends_of
from saturn_airflow.planning.online.error_law import ErrorLaw, Parts, fit
from saturn_airflow.planning.online.execution import Situation, execute
from saturn_airflow.planning.planner import solve
from saturn_airflow.sharing.drawn_futures import odds
from saturn_airflow.sharing.replay import replay

NODES = (Node("a", 4, "gpu"), Node("b", 4, "gpu"))
RULES = SharingRules()
CONFIDENCE = 0.9
#: Futures that are drawn for somebody who knows the law.
KNOWN_DRAWS = 199
#: The widths are looked at for one pair of sweeps of so many.
KNOWN_EACH = 5
Standard = Callable[[random.Random], float]


def _heavy(chance: random.Random) -> float:
    return chance.gauss(0, 1) / math.sqrt(chance.gammavariate(1.5, 2.0))  # variance 1: t_3 / sqrt(3)


def _skewed(chance: random.Random) -> float:
    return chance.expovariate(1.0) - 1.0


def _mixed(chance: random.Random) -> float:
    return chance.gauss(0, 3.0 if chance.random() < 0.1 else 1.0) / math.sqrt(1.8)


STANDARDS: dict[str, Standard] = {
    "normal": lambda chance: chance.gauss(0, 1),
    "heavy": _heavy,
    "skewed": _skewed,
    "mixed": _mixed,
}


class Truth(NamedTuple):
    """How errors come."""

    parts: Parts
    standard: Standard

    def factors(self, jobs: Sequence[PlannedJob], chance: random.Random) -> tuple[PlannedJob, ...]:
        """What the jobs of one sweep really take, but for what those on a node share."""
        shared = self.parts.bias + self.parts.sweep * self.standard(chance)
        return tuple(at_pace(job, math.exp(shared + self.parts.own * self.standard(chance))) for job in jobs)

    def nodes(self, chance: random.Random) -> dict[str, float]:
        """How slow each node is."""
        return {node.name: math.exp(self.parts.node * self.standard(chance)) for node in NODES}

    def past(self, sweeps: int, chance: random.Random) -> list[PastError]:
        """Earlier errors."""
        found = []
        job = PlannedJob("j", (Option("t", 1, {"gpu": 1.0}),))
        for sweep in range(sweeps):
            slow = self.nodes(chance)
            for number, one in enumerate(self.factors([job] * chance.randint(3, 8), chance)):
                node = chance.choice(NODES).name
                factor = slow[node] * one.options[0].seconds["gpu"]
                found.append(PastError(f"p{sweep}", f"j{number}", factor, node))
        return found


#: What is promised, a draw of the end that is true, and seconds by which widths are measured.
Case = tuple[Ends, Callable[[random.Random], float], float]


class Kept(NamedTuple):
    """What became of a promise; widths are shares of the planned time."""

    name: str
    together: bool
    past: int
    kept: bool
    late: float
    width: float
    known_late: float | None = None
    known_width: float | None = None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sweeps", type=int, default=2000, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count(), metavar="N")
    parser.add_argument("--out", type=Path, help="where to write the results (JSON)")
    args = parser.parse_args()
    with ProcessPoolExecutor(args.processes) as pool:
        asked = [(args.seed, number) for number in range(args.sweeps)]
        found = list(pool.map(promise, asked, chunksize=5))
    result: dict[str, Any] = {
        "machine": describe(),
        "seed": args.seed,
        "confidence": CONFIDENCE,
        "all": told(found),
        "as planned, alone": told([one for one in found if not one.together]),
        "in turns with another": told([one for one in found if one.together]),
        "by distribution": {name: told([one for one in found if one.name == name]) for name in STANDARDS},
        "by earlier sweeps": {
            f"{low} to {high}": told([one for one in found if low <= one.past <= high])
            for low, high in ((2, 4), (5, 10), (11, 30))
        },
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    print(table(result))
    return 0


def table(result: dict[str, Any]) -> str:
    """The results as a Markdown table."""
    distributions = {
        "normal": "normal errors",
        "heavy": "heavy tails",
        "skewed": "skewed",
        "mixed": "mixed",
    }
    rows = {
        "run as planned": result["as planned, alone"],
        "in turns with another": result["in turns with another"],
        **{word: result["by distribution"][name] for name, word in distributions.items()},
        **{
            f"errors of {past} earlier sweeps" if past == "2 to 4" else past: of
            for past, of in result["by earlier sweeps"].items()
        },
    }
    lines = ["| sweeps | kept | 95% interval | width over known law |", "| --- | --- | --- | --- |"]
    for name, of in rows.items():
        low, high = of["kept_interval"]
        lines.append(
            f"| {name} | {of['kept']:.1%} | {low:.1%} to {high:.1%} | {of['width_over_known_law']:.2f} |"
        )
    return "\n".join(lines)


def told(found: Sequence[Kept]) -> dict[str, Any]:
    """The figures of some promises."""
    kept = sum(one.kept for one in found)
    known = [one for one in found if one.known_late is not None]
    return {
        "sweeps": len(found),
        "kept": round(kept / len(found), 4),
        "kept_interval": [round(end, 4) for end in wilson(kept, len(found))],
        "late_width_over_known_law": _ratio(known, "late"),
        "width_over_known_law": _ratio(known, "width"),
    }


def _ratio(known: Sequence[Kept], what: str) -> float | None:
    by_law = sum(getattr(one, f"known_{what}") for one in known)
    return round(sum(getattr(one, what) for one in known) / by_law, 3) if by_law else None


def promise(asked: tuple[int, int]) -> Kept:
    """One sweep: what is promised, what is true, and what one who knows the law would have promised."""
    seed, number = asked
    chance = random.Random(f"promises {seed} {number}")
    name = list(STANDARDS)[number // 2 % len(STANDARDS)]
    off = chance.uniform(0.05, 0.35)
    shares = [chance.expovariate(1.0) for _ in range(3)]
    parts = (off * math.sqrt(share / sum(shares)) for share in shares)
    truth = Truth(Parts(chance.uniform(-0.1, 0.1), *parts), STANDARDS[name])
    sweeps = round(math.exp(chance.uniform(math.log(2), math.log(30))))
    law = fit(truth.past(sweeps, chance))
    told, end, scale = (_together if number % 2 else _alone)(truth, law, chance, number)
    kept = Kept(
        name,
        bool(number % 2),
        sweeps,
        end(chance) <= told.by(CONFIDENCE),
        (told.by(CONFIDENCE) - told.median) / scale,
        (told.by(CONFIDENCE) - told.by(1 - CONFIDENCE)) / scale,
    )
    if number // 2 % KNOWN_EACH:
        return kept
    known = Ends(tuple(sorted(end(chance) for _ in range(KNOWN_DRAWS))))
    return kept._replace(
        known_late=(known.by(CONFIDENCE) - known.median) / scale,
        known_width=(known.by(CONFIDENCE) - known.by(1 - CONFIDENCE)) / scale,
    )


def _alone(truth: Truth, law: ErrorLaw, chance: random.Random, number: int) -> Case:
    problem = Problem("p", NODES, tuple(_job(j, chance) for j in range(chance.randint(1, 10))))
    plan = solve(problem, time_limit=0.05, repeatable=True)
    nodes = {a.job: a.node for a in plan.assignments}
    situation = Situation(dict.fromkeys(nodes, 1.0))

    def end(chance: random.Random) -> float:
        slow = truth.nodes(chance)
        jobs = tuple(at_pace(job, slow[nodes[job.name]]) for job in truth.factors(problem.jobs, chance))
        return execute(Problem("p", NODES, jobs), plan, situation).end

    return ends_of(problem, plan, situation, law, seed=number).sweep, end, plan.makespan


def _together(truth: Truth, law: ErrorLaw, chance: random.Random, number: int) -> Case:
    sweeps = tuple(_sweep(f"s{i}", chance) for i in range(2))
    cluster = SharedCluster(0.0, NODES, sweeps)

    def end(chance: random.Random) -> float:
        actual = {
            (sweep.name, job.name): job
            for sweep in sweeps
            for job in truth.factors([job.job for job in sweep.jobs], chance)
        }
        slow = truth.nodes(chance)
        return replay((), NODES, RULES, begin=cluster, actual=actual, slow=slow).done["s0"]

    return odds(cluster, RULES, law, seed=number).sweeps["s0"], end, sweeps[0].alone


def _sweep(name: str, chance: random.Random) -> SharedSweep:
    jobs = tuple(_job(j, chance) for j in range(chance.randint(1, 6)))
    return SharedSweep(name, tuple(map(SharedJob, jobs)), 0.0, least_seconds(jobs, NODES), preempt=True)


def _job(number: int, chance: random.Random) -> PlannedJob:
    work, power = chance.lognormvariate(7.5, 0.7), chance.uniform(0.5, 0.95)
    options = tuple(Option("t", k, {"gpu": 40 + work / k**power}, 40.0) for k in (1, 2, 4))
    return PlannedJob(f"j{number}", options)


def wilson(kept: int, number: int) -> tuple[float, float]:
    """The 95% interval of a share (Wilson 1927)."""
    z, share = 1.96, kept / number
    middle = share + z * z / (2 * number)
    half = z * math.sqrt(share * (1 - share) / number + z * z / (4 * number * number))
    return (middle - half) / (1 + z * z / number), (middle + half) / (1 + z * z / number)


if __name__ == "__main__":
    raise SystemExit(main())
