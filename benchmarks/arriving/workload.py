"""Sweeps that arrive over days, drawn with a seed."""

from __future__ import annotations

import dataclasses
import math
import random

from saturn_airflow.model.cluster import Node
from saturn_airflow.model.problem import Option, PlannedJob
from saturn_airflow.model.sharing import SharedJob, SharedSweep, least_seconds
from saturn_airflow.sharing.replay import Arrival

NODES = tuple(Node(f"node{i:02d}", 8, "a100") for i in range(4))
DAY = 86400.0
#: Seconds of a launch, as in rounds.py.
LAUNCH = 40.0
#: How much more arrives at the day's peak than on average.
PEAK = 0.5


def sweeps(
    number: int, load: float, seed: int, nodes: tuple[Node, ...] = NODES, preempt: bool = True
) -> list[SharedSweep]:
    """So many sweeps of 1 to 30 jobs whose least device-seconds come to this load of the devices.

    A job takes w / k^a seconds on k devices (with some noise, as in ``instances/``), w lognormal for the
    sweep and for the job in it, a from 0.5 to 0.95 for the sweep; a sixth of the sweeps needs at least 2
    devices, a sixth 4.
    """
    chance = random.Random(f"arrivals {seed}")
    drawn = [_jobs(chance) for _ in range(number)]
    area = sum(min(o.devices * o.seconds["a100"] for o in job.options) for jobs in drawn for job in jobs)
    rate = load * sum(node.devices for node in nodes) / (area / number)
    found, now = [], 0.0
    for i, jobs in enumerate(drawn):
        # A Poisson process whose rate has daily peaks, by thinning.
        while True:
            now += chance.expovariate(rate * (1 + PEAK))
            if chance.random() * (1 + PEAK) < 1 + PEAK * math.sin(2 * math.pi * now / DAY):
                break
        found.append(
            SharedSweep(
                f"s{i:04d}",
                tuple(SharedJob(job) for job in jobs),
                arrived=now,
                alone=least_seconds(jobs, nodes),
                priority=1.0 if chance.random() < 0.05 else 0.0,
                team="vision" if chance.random() < 0.6 else "text",
                preempt=preempt,
            )
        )
    return found


def with_errors(sweep: SharedSweep, off: float, seed: int) -> Arrival:
    """``sweep`` with jobs that really take other seconds: lognormal, half by job, half by strategy."""

    def changed(job: PlannedJob) -> PlannedJob:
        chance = random.Random(f"{seed} {sweep.name} {job.name}")
        shared = chance.gauss(0, 1)

        def factor() -> float:
            return math.exp(off * (shared + chance.gauss(0, 1)) / math.sqrt(2))

        options = tuple(
            dataclasses.replace(
                o, seconds={k: o.setup + (s - o.setup) * factor() for k, s in o.seconds.items()}
            )
            for o in job.options
        )
        return dataclasses.replace(job, options=options)

    return Arrival(sweep, tuple(changed(job.job) for job in sweep.jobs))


def _jobs(chance: random.Random) -> tuple[PlannedJob, ...]:
    count = min(30, max(1, round(chance.lognormvariate(1.2, 1.0))))
    size = chance.lognormvariate(math.log(2400), 1.0)
    power = chance.uniform(0.5, 0.95)
    least = chance.choice((1, 1, 1, 1, 2, 4))
    jobs = []
    for j in range(count):
        work = max(60.0, size * chance.lognormvariate(0, 0.6))
        options = []
        for k in (1, 2, 4, 8):
            if k >= least:
                seconds = (
                    work * least**0.9 / k**power * least**power * chance.uniform(0.97, 1.03) / least**0.9
                )
                technique = "single" if k == 1 else "fsdp"
                options.append(Option(technique, k, {"a100": round(LAUNCH + seconds, 1)}, LAUNCH))
        jobs.append(PlannedJob(f"j{j:02d}", tuple(options)))
    return tuple(jobs)
