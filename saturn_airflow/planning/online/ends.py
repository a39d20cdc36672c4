"""When a plan may end, put as a range: errors that might be are drawn, and the plan is run under each.

With n draws, the k-th smallest end is not missed with odds of k / (n + 1) where the true errors are one more
draw of the kind.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.plan import Place, Plan
from saturn_airflow.model.problem import Option, PlannedJob, Problem
from saturn_airflow.planning.online.error_law import ErrorLaw, Parts
from saturn_airflow.planning.online.execution import Situation, execute

#: How often the future of a plan is drawn: with these, 90% is the 180th of 200.
DRAWS = 199


@dataclass(frozen=True)
class Ends:
    """When something may end: a sample of ends.

    :param drawn: the ends of the draws, in seconds of one clock, ascending; infinite for never.
    """

    drawn: tuple[float, ...]

    def by(self, confidence: float) -> float:
        """The moment by which it ends with this probability; infinite where the draws can't say.

        :raises InvalidSweepError: when that is no probability between 0 and 1.
        """
        if not 0 < confidence < 1:
            raise InvalidSweepError(f"confidence is {confidence!r}; give a probability such as 0.9")
        # 0.55 * 200 is 110.00000000000001 in floating point: that is the 110th, not the 111th.
        place = math.ceil(confidence * (len(self.drawn) + 1) - 1e-9)
        return self.drawn[place - 1] if place <= len(self.drawn) else math.inf

    @property
    def median(self) -> float:
        """The moment by which it ends as likely as not."""
        return self.by(0.5)

    def since(self, moment: float) -> Ends:
        """The same in seconds from ``moment`` on."""
        return Ends(tuple(end - moment for end in self.drawn))

    def odds(self, moment: float) -> float:
        """The probability that it ends by ``moment``, between 0 and 1."""
        return sum(end <= moment for end in self.drawn) / (len(self.drawn) + 1)


@dataclass(frozen=True)
class PlanEnds:
    """When a plan may end, in seconds from now.

    :param sweep: all of it.
    :param jobs: each job.
    """

    sweep: Ends
    jobs: Mapping[str, Ends]

    def since(self, moment: float) -> PlanEnds:
        """The same in seconds from ``moment`` on."""
        return PlanEnds(
            self.sweep.since(moment), {job: ends.since(moment) for job, ends in self.jobs.items()}
        )


def ends_of(
    problem: Problem,
    plan: Plan,
    situation: Situation,
    law: ErrorLaw,
    *,
    seen: Collection[str] = (),
    checkpoint: float = 0.0,
    draws: int = DRAWS,
    seed: int = 0,
) -> PlanEnds:
    """Draw the future of ``plan``, run from ``situation`` on by the rules of :func:`execute`.

    :param problem: whole jobs, with the seconds that are expected now.
    :param law: of errors of what is expected.
    :param seen: jobs that run and whose speed was seen there: what is expected of them there is right.
    :param checkpoint: seconds that saving a job takes when it is moved.
    :raises InvalidSweepError: for less than one draw.
    """
    if draws < 1:
        raise InvalidSweepError(f"draws is {draws!r}; give at least 1")
    nodes = {a.job: a.node for a in plan.assignments}
    here = {job: situation.running[job] for job in seen if job in situation.running}
    asked = tuple(_as_planned(problem, plan))
    sweep: list[float] = []
    jobs: dict[str, list[float]] = {job.name: [] for job in asked if job.name in situation.left}
    for number in range(draws):
        chance = random.Random(f"{seed} {number}")
        parts = law.drawn(chance)
        slow = {node.name: math.exp(chance.gauss(0, parts.node)) for node in problem.nodes}
        drawn = drawn_jobs(asked, law, parts, here, chance)
        paced = tuple(
            job if job.name in here else at_pace(job, slow.get(nodes[job.name], 1.0)) for job in drawn
        )
        run = execute(dataclasses.replace(problem, jobs=paced), plan, situation, checkpoint=checkpoint)
        ends = {stretch.job: stretch.end for stretch in run.stretches}
        for name, values in jobs.items():
            values.append(ends.get(name, math.inf))
        sweep.append(math.inf if run.situation.left else run.end)
    return PlanEnds(
        Ends(tuple(sorted(sweep))), {name: Ends(tuple(sorted(values))) for name, values in jobs.items()}
    )


def drawn_jobs(
    jobs: Collection[PlannedJob],
    law: ErrorLaw,
    parts: Parts,
    here: Mapping[str, Place],
    chance: random.Random,
) -> tuple[PlannedJob, ...]:
    """One draw of what the jobs of a sweep may really take, but for the part that those on a node share.

    :param parts: of ``law``, taken to be the true ones.
    :param here: where jobs run whose speed there was seen.
    :param chance: to draw with.
    """
    # Once the speed of some jobs was seen, estimates have been corrected by it: for the bias, and for what it
    # tells of the part that the sweep shares. What is left of that part is drawn.
    shared = (0.0 if here else parts.bias) + chance.gauss(0, 1) * parts.after(len(here))
    found = []
    for job in jobs:
        place, own = here.get(job.name), shared + chance.gauss(0, parts.job)
        gap = law.gap(chance)
        options = []
        for option in job.options:
            factor = math.exp(own + chance.gauss(0, parts.strategy))
            if place is not None and (option.technique, option.devices) == (place.technique, place.devices):
                options.append(option)
            else:
                options.append(_scaled(option, factor, gap))
        found.append(dataclasses.replace(job, options=tuple(options)))
    return tuple(found)


def at_pace(job: PlannedJob, factor: float) -> PlannedJob:
    """``job`` with all its seconds times ``factor``."""
    return dataclasses.replace(job, options=tuple(_scaled(o, factor) for o in job.options))


def _as_planned(problem: Problem, plan: Plan) -> Iterator[PlannedJob]:
    """The jobs of ``plan``, each with the strategy under which it runs alone, to save drawing the others.

    A job whose strategy fits on no node any more keeps all.
    """
    chosen = {a.job: (a.technique, a.devices) for a in plan.assignments}
    for job in problem.jobs:
        if job.name not in chosen:
            continue
        own = tuple(o for o in job.options if (o.technique, o.devices) == chosen[job.name])
        fits = any(problem.fits(job, option, node) for option in own for node in problem.nodes)
        yield dataclasses.replace(job, options=own) if fits else job


def _scaled(option: Option, factor: float, gap: float = 0.0) -> Option:
    """``option`` with all its seconds times ``factor``, and ``gap`` seconds more of set-up."""
    seconds = {kind: gap + s * factor for kind, s in option.seconds.items()}
    return dataclasses.replace(option, seconds=seconds, setup=gap + option.setup * factor)
