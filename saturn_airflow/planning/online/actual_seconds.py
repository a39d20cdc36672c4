"""What the jobs of a simulation really take: their estimates with random errors."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any, Literal

from saturn_airflow.model.problem import Problem

Shape = Literal["job", "strategy", "make", "mixed"]
"""What errors have in common: see :func:`truth`."""


def with_launches(problem: Problem, seconds: float) -> Problem:
    """``problem`` with so many seconds of set-up for strategies that have none, on top of their seconds."""
    return _each_option(
        problem,
        lambda job, option: (
            option
            if option.setup
            else dataclasses.replace(
                option, seconds={k: s + seconds for k, s in option.seconds.items()}, setup=seconds
            )
        ),
    )


def truth(problem: Problem, noise: float, seed: int, shape: Shape = "mixed") -> Problem:
    """What jobs really take: the estimates times lognormal factors, whose median is 1.

    :param noise: standard deviation of the factors' logarithm; 0.2 is about 20%.
    :param shape: what errors have in common. ``"job"``: all strategies of a job, ``"make"``: all jobs with
        equal strategies, ``"strategy"``: nothing, ``"mixed"``: a third of the variance each.
    """
    # Of equal variance each: of the make, the job, the strategy; together they vary by ``noise``.
    parts = {"job": (0, 1, 0), "make": (1, 0, 0), "strategy": (0, 0, 1), "mixed": (1, 1, 1)}[shape]
    scale = noise / math.sqrt(sum(parts))

    def drawn(*what: object) -> float:
        # Seeded by what it is of, so that no draw depends on which others are made, or in which order.
        return random.Random(repr((seed, *what))).gauss(0, 1)

    def changed(job: Any, option: Any) -> Any:
        make = repr([o.to_dict() for o in job.options])
        seconds = {}
        for kind, whole in option.seconds.items():
            strategy = (job.name, option.technique, option.devices, kind)
            log = (
                parts[0] * drawn("make", make)
                + parts[1] * drawn("job", job.name)
                + parts[2] * drawn(*strategy)
            )
            seconds[kind] = option.setup + (whole - option.setup) * math.exp(scale * log)
        return dataclasses.replace(option, seconds=seconds)

    return _each_option(problem, changed)


def _each_option(problem: Problem, change: Any) -> Problem:
    jobs = tuple(
        dataclasses.replace(job, options=tuple(change(job, option) for option in job.options))
        for job in problem.jobs
    )
    return dataclasses.replace(problem, jobs=jobs)
