"""A round of a sweep that is planned while others are active.

Its plan says where each job runs and under which strategy, and its jobs take their turns among all others.
So plans are judged by what is then expected of them: the one that stands, the exact one around what others
run, and those that leave what runs where it is and let the rules place what waits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from saturn_airflow.model.plan import Place, Plan
from saturn_airflow.model.problem import PlannedJob, Problem
from saturn_airflow.model.sharing import SharedCluster, SharedJob, SharedSweep, SharingRules
from saturn_airflow.planning.online.adoption import LEAST_WIN, Adoption
from saturn_airflow.planning.online.execution import Situation
from saturn_airflow.sharing.among import as_plan, entered, expected_of

#: Seconds of no account.
_SOON = 1e-3

Where = Mapping[str, Place]
"""By job, its node and strategy; devices are settled in its turn."""


class RoundAmong(NamedTuple):
    """A plan of a round among others.

    :param plan: with the times that are expected.
    :param moved: running jobs that are stopped for it.
    :param jobs: as the plan has them.
    """

    plan: Plan
    moved: tuple[str, ...]
    jobs: tuple[SharedJob, ...]

    @property
    def value(self) -> float:
        """What is to be small: when all is done, or the mean completion time where that is the objective."""
        return self.plan.makespan if self.plan.value is None else self.plan.value


@dataclass(frozen=True)
class RoundBegins:
    """What a round begins with.

    :param problem: whole jobs, with the seconds now expected, on the nodes that are there.
    :param situation: where they stand.
    :param sweep: the facts of the sweep.
    :param checkpoint: seconds that saving a job takes.
    """

    problem: Problem
    situation: Situation
    sweep: SharedSweep
    others: SharedCluster
    rules: SharingRules
    checkpoint: float = 0.0

    def decide(
        self,
        exact: Adoption,
        before: Plan | None,
        length: Callable[[float], float] = lambda makespan: math.inf,
    ) -> tuple[Adoption, RoundAmong] | None:
        """What to do; None where a job finds no place among the others.

        Another plan than the one that stands must win a share of what is left, and moves a running job only
        to devices that it has at once: who waits may lose his turn.

        :param exact: what was decided around the jobs of others that run.
        :param before: the plan that stands; None at the start.
        :param length: when the next boundary is to come after a plan of so many seconds is begun.
        :raises AssertionError: when what is expected never ends, which is a mistake of Saturn's.
        """
        standing = None if before is None else self._standing(before)
        carried_on = None if standing is None else self._judged(standing, exact.plan)
        otherwise = math.inf if carried_on is None else carried_on.value
        best, won = carried_on, otherwise * (1 - LEAST_WIN)
        planned = _places(exact.plan)
        found = [self._judged(planned, exact.plan, [job for job in exact.moved if job in self._running])]
        found += [self._judged(where, exact.plan) for where in self._by_the_rules(planned)]
        for one in found:
            if one is not None and (best is None or one.value < won):
                best, won = one, one.value
        if best is None:
            return None
        ends = length(best.plan.makespan)
        return Adoption(best.plan, best is not carried_on, best.value, otherwise, best.moved, ends), best

    @cached_property
    def _running(self) -> Where:
        """Where its jobs run, on nodes that are there."""
        nodes = {node.name for node in self.problem.nodes}
        return {job: place for job, place in self.situation.running.items() if place.node in nodes}

    def _standing(self, before: Plan) -> Where | None:
        """Where all are if nothing changes; None where a node or strategy of the plan is gone."""
        where = {**_places(before), **self._running}
        fits = (_fits(self.problem, job, where.get(job.name)) for job in self.problem.jobs)
        return where if all(fits) else None

    def _by_the_rules(self, planned: Where) -> Iterator[Where]:
        """Where the rules put what waits, on any node, and on those that are ``planned``; what runs stays."""
        own = tuple(node.name for node in self.problem.nodes)
        anywhere = {job.name: job.nodes or own for job in self.problem.jobs}
        for nodes_of in (anywhere, {job: (place.node,) for job, place in planned.items()}):
            jobs = [
                self._as_it_stands(replace(job, nodes=nodes_of[job.name]), self._running)
                for job in self.problem.jobs
            ]
            expected = expected_of(
                entered(self.problem, self.sweep, self.others, jobs), self.sweep, self.rules
            )
            if expected:
                yield {name: each.place for name, each in expected.items()}

    def _judged(self, where: Where, bounds: Plan, moved: Collection[str] = ()) -> RoundAmong | None:
        """What to expect where these running jobs are ``moved``; None where it is not to be."""
        stays = {job: place for job, place in self._running.items() if job not in moved}
        jobs = tuple(
            self._as_it_stands(self._decided(job, where[job.name], stays), stays) for job in self.problem.jobs
        )
        now, gone = self.others.now, self.others.now + self.checkpoint
        # Jobs that move hold their old devices until their checkpoints are written.
        left = [(place.node, d) for job in moved for place in [self._running[job]] for d in place.device_ids]
        others = replace(self.others, busy={**self.others.busy, **dict.fromkeys(left, gone)})
        expected = expected_of(entered(self.problem, self.sweep, others, jobs), self.sweep, self.rules)
        # Who is stopped and then has to wait was moved for nothing.
        if not expected or any(expected[job].start > gone + _SOON for job in moved):
            return None
        return RoundAmong(as_plan(bounds, self.problem, expected, now), tuple(sorted(moved)), jobs)

    def _decided(self, job: PlannedJob, place: Place, stays: Where) -> PlannedJob:
        """``job`` with the one node and strategy of ``place``; being stopped first is part of its set-up."""
        option = next(o for o in job.options if (o.technique, o.devices) == (place.technique, place.devices))
        if job.name in self.situation.running and job.name not in stays:
            seconds = {kind: whole + self.checkpoint for kind, whole in option.seconds.items()}
            option = replace(option, seconds=seconds, setup=option.setup + self.checkpoint)
        return replace(job, options=(option,), nodes=(place.node,))

    def _as_it_stands(self, job: PlannedJob, running: Where) -> SharedJob:
        place, left = running.get(job.name), self.situation.left[job.name]
        setting_up = 0.0 if place is None else self.situation.setting_up.get(job.name, 0.0)
        return SharedJob(job, left, place, since=self.others.now, setting_up=setting_up)


def _places(plan: Plan) -> Where:
    return {a.job: Place.of(a) for a in plan.assignments}


def _fits(problem: Problem, job: PlannedJob, place: Place | None) -> bool:
    node = next((node for node in problem.nodes if place is not None and node.name == place.node), None)
    if place is None or node is None:
        return False
    own = [o for o in job.options if (o.technique, o.devices) == (place.technique, place.devices)]
    return any(problem.fits(job, option, node) for option in own)
