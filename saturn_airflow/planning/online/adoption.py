"""At a boundary: carry the plan on, or adopt another that is expected to win more than its moves cost."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from saturn_airflow.model.plan import Assignment, Plan
from saturn_airflow.model.problem import Problem
from saturn_airflow.planning.clock import Clock, LookClock
from saturn_airflow.planning.heuristics.foresight import foresee
from saturn_airflow.planning.instances.instance import group
from saturn_airflow.planning.instances.schedule import assignments, makespan
from saturn_airflow.planning.objectives import DEVICE_TIME, MAKESPAN, MEAN_COMPLETION
from saturn_airflow.planning.online.begun_later import begun_later, seen_from
from saturn_airflow.planning.online.equal_nodes import stay_among_equals
from saturn_airflow.planning.online.execution import Execution, Situation, execute, keep_places, same_but_ids
from saturn_airflow.planning.online.replanning import carry_on, remaining
from saturn_airflow.planning.planner import solve

#: A new plan must win at least this share of what is left: it stops jobs, and predictions are not that good.
LEAST_WIN = 0.002


class Adoption(NamedTuple):
    """What was decided at a boundary.

    :param plan: to be run from now on, with the times at which its jobs are expected to start and end.
    :param adopted: whether it is another than before.
    :param expected: seconds from now until all is done, moves included, and the next boundary put to use;
        for an objective other than the makespan, what it comes to.
    :param otherwise: the same for the plan before it.
    :param moved: running jobs that are stopped for it.
    :param length: seconds from now to the next boundary; infinite where there is none.
    """

    plan: Plan
    adopted: bool
    expected: float
    otherwise: float
    moved: tuple[str, ...]
    length: float

    def later(self, seconds: float) -> Adoption:
        """The same, with all of it so many seconds later."""
        cost = 0.0 if self.plan.objective == DEVICE_TIME else seconds
        return self._replace(
            plan=begun_later(self.plan, seconds),
            expected=self.expected + cost,
            otherwise=self.otherwise + cost,
            length=self.length + seconds,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effort:
    """How to search, and for what.

    :param time_limit: seconds of each solve; at a boundary with another to come there are up to five.
    :param repeatable: count steps rather than seconds, see :func:`solve`.
    :param deadline: seconds from now, for the objective ``"device-time"``.
    :param all_wait: whether nothing runs until there is a plan, see :func:`solve`.
    """

    time_limit: float = 10.0
    seed: int = 0
    repeatable: bool = False
    objective: str = MAKESPAN
    deadline: float | None = None
    all_wait: bool = False

    def solve(self, problem: Problem, previous: Plan | None) -> Plan:
        """The best plan for ``problem`` found in that time."""
        return solve(
            problem,
            time_limit=self.time_limit,
            seed=self.seed,
            repeatable=self.repeatable,
            previous=previous,
            objective=self.objective,
            deadline=self.deadline,
            all_wait=self.all_wait,
        )

    def cost(self, problem: Problem, run: Execution) -> float:
        """The objective's value of a simulated ``run``: less is better, infinite where jobs are left.

        Seconds, or device-seconds for ``"device-time"``.
        """
        if run.situation.left:
            return math.inf
        if self.objective == MEAN_COMPLETION:
            weights = {job.name: job.weight for job in problem.jobs}
            total = sum(weights[s.job] * s.end for s in run.stretches)
            return total / (sum(weights[s.job] for s in run.stretches) or 1.0)
        if self.objective == DEVICE_TIME:
            assert self.deadline is not None
            if run.end <= self.deadline:
                return sum(s.place.devices * (s.end - s.start) for s in run.stretches)
            # More than any run that ends in time can cost, and the more the later.
            return run.end * sum(node.devices for node in problem.nodes)
        return run.end

    def clock(self) -> Clock:
        """A clock that gives a search that time."""
        return LookClock(self.time_limit) if self.repeatable else Clock(self.time_limit)


def decide(
    problem: Problem,
    plan: Plan | None,
    situation: Situation,
    *,
    effort: Effort,
    checkpoint: float,
    length: Callable[[float], float] = lambda makespan: math.inf,
    least_win: float = LEAST_WIN,
    least_seconds: float = 0.0,
    foresight: bool = True,
) -> Adoption:
    """What to do at a boundary, or at the start.

    All plans are judged by simulating them (:func:`execute`) from where things are: jobs that stay pay
    nothing, jobs that move pay for the checkpoint, and for setting up where they go. Where another boundary
    is to come, a plan may also be judged by what can be made of it then: what it leaves is planned anew, and
    that is simulated.

    :param problem: whole jobs, with the seconds now expected, and the nodes there now are.
    :param plan: what is being run; None at the start.
    :param checkpoint: seconds that saving a job takes.
    :param length: when the next boundary is to come after a plan of so many seconds is begun.
    :param least_win: what a new plan must win, as a share of what is left.
    :param least_seconds: the same in seconds.
    :param foresight: whether to look beyond the next boundary.
    """
    left = what_is_left(problem, situation)
    new = effort.solve(left, plan)
    ends = length(new.makespan)
    looks_ahead = foresight and effort.objective == MAKESPAN and ends < new.makespan

    def expected(candidate: Plan) -> float:
        """What the candidate comes to: carried through or, if that is less, changed at the boundary."""
        end = effort.cost(problem, execute(problem, candidate, situation, checkpoint=checkpoint))
        if not looks_ahead:
            return end
        then = execute(problem, candidate, situation, until=ends, checkpoint=checkpoint)
        if not then.situation.left:
            return end
        later = seen_from(problem, ends)
        rest = effort.solve(what_is_left(later, then.situation), candidate)
        rest = stay_among_equals(rest, later, then.situation.running)
        rest = keep_places(rest, later, then.situation.running)
        return min(end, ends + execute(later, rest, then.situation, checkpoint=checkpoint).end)

    # ``won``: what a candidate must come below, the standing plan less the least win, then the best so far.
    otherwise = math.inf if plan is None else expected(plan)
    best = plan if math.isfinite(otherwise) else None
    won = otherwise - max(least_seconds, otherwise * least_win) if best else math.inf
    for candidate in _candidates(new, left, situation, effort, ends if looks_ahead else None):
        value = expected(candidate)
        if best is None or value < won:
            best, won = candidate, value
    assert best is not None
    run = execute(problem, best, situation, checkpoint=checkpoint)
    cost = otherwise if best is plan else won
    new = _from_now(new, run, effort.cost(problem, run))
    return Adoption(new, best is not plan, cost, otherwise, run.moved, ends)


def _from_now(new: Plan, run: Execution, cost: float) -> Plan:
    """What is expected to happen, as a plan with the bounds of the ``new`` one."""
    assigned = tuple(
        Assignment(
            s.job, s.place.technique, s.place.devices, s.place.node, s.place.device_ids, s.start, s.end
        )
        for s in run.stretches
    )
    if new.value is not None and new.value_bound is not None:
        new = dataclasses.replace(new, value=cost, value_bound=min(new.value_bound, cost))
    return dataclasses.replace(
        new, makespan=run.end, lower_bound=min(new.lower_bound, run.end), assignments=assigned
    )


def _candidates(
    new: Plan, left: Problem, situation: Situation, effort: Effort, ends: float | None
) -> Iterator[Plan]:
    """Plans to choose from: the new one and, before another boundary at ``ends``, one that foresees it.

    Each with running jobs where they are as far as that changes no times, and with them first on their
    devices.
    """
    for found in (new, *([] if ends is None else [_foreseen(new, left, ends, effort)])):
        found = stay_among_equals(found, left, situation.running)
        kept = keep_places(found, left, situation.running)
        yield kept
        if (first := keep_places(_running_first(found, situation), left, situation.running)) != kept:
            yield first


def _foreseen(new: Plan, left: Problem, ends: float, effort: Effort) -> Plan:
    """``new``, changed so that it leaves little for after the boundary at ``ends``."""
    instance = group(left)
    schedule = foresee(instance, carry_on(instance, new), ends, new.makespan, effort.seed, effort.clock())
    return dataclasses.replace(
        new, makespan=makespan(instance, schedule), assignments=assignments(instance, schedule)
    )


def what_is_left(problem: Problem, situation: Situation) -> Problem:
    """What is left of ``problem``, jobs that run going on without setting up."""
    progress = {job.name: 1 - situation.left.get(job.name, 0.0) for job in problem.jobs}
    running = {job: (place.technique, place.devices) for job, place in situation.running.items()}
    return remaining(problem, progress, running)


def _running_first(plan: Plan, situation: Situation) -> Plan:
    """``plan`` with a running job and the one just before it exchanged, where the running job then goes on.

    Only where both use the same devices and the first starts now, so that nothing else changes its times.
    """
    by_devices: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    assigned = list(plan.assignments)
    for index, a in enumerate(assigned):
        by_devices.setdefault((a.node, a.device_ids), []).append(index)
    for indices in by_devices.values():
        indices.sort(key=lambda index: assigned[index].start)
        for one, two in itertools.pairwise(indices):
            earlier, later = assigned[one], assigned[two]
            if (
                same_but_ids(later, situation.running.get(later.job))
                and earlier.start == 0
                and earlier.end == later.start
                and earlier.job not in situation.running
            ):
                seconds = later.seconds
                assigned[one] = dataclasses.replace(later, start=0.0, end=seconds)
                assigned[two] = dataclasses.replace(earlier, start=seconds, end=seconds + earlier.seconds)
    return dataclasses.replace(plan, assignments=tuple(sorted(assigned, key=lambda a: (a.start, a.job))))
