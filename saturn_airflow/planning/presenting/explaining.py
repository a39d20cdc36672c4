"""Why a plan is as it is: what each job's alternatives would have cost, what bounds the makespan."""

from __future__ import annotations

from dataclasses import dataclass

from saturn_airflow.model.plan import Assignment, Plan
from saturn_airflow.model.problem import Problem
from saturn_airflow.planning.instances.instance import Instance, group
from saturn_airflow.planning.instances.schedule import Placed, times
from saturn_airflow.planning.lower_bounds.area import filled, simple_bound
from saturn_airflow.planning.online.replanning import carry_on


@dataclass(frozen=True)
class Alternative:
    """Another strategy a job could have run under on its node.

    :param seconds: how long the job would take.
    :param device_seconds: its devices times that.
    :param makespan: of the plan with nothing else changed.
    """

    technique: str
    devices: int
    seconds: float
    device_seconds: float
    makespan: float


@dataclass(frozen=True)
class Reason:
    """Why one job runs as it does.

    :param text: one line for people.
    """

    assignment: Assignment
    alternatives: tuple[Alternative, ...]
    text: str


@dataclass(frozen=True)
class Explanation:
    """A plan, explained.

    :param bounded_by: one sentence: what keeps the makespan from being shorter.
    :param utilisation: by node, the share (0 to 1) of its devices' time until the makespan, from when each is
        free, in which they train.
    """

    reasons: tuple[Reason, ...]
    bounded_by: str
    utilisation: dict[str, float]

    @property
    def overall(self) -> float:
        """The mean of the nodes' utilisation; each counts the same, however many devices it has."""
        return sum(self.utilisation.values()) / len(self.utilisation)


def explain(problem: Problem, plan: Plan) -> Explanation:
    """Explain ``plan``, made for ``problem``."""
    instance = group(problem)
    schedule = carry_on(instance, plan)
    where = {placed.job: node for node, row in enumerate(schedule) for placed in row}
    jobs = {job.name: index for index, job in enumerate(problem.jobs)}
    ends = [max((run.end for run in times(instance, n, row)), default=0.0) for n, row in enumerate(schedule)]
    reasons = []
    for a in plan.assignments:
        job = jobs[a.job]
        node = where[job]
        kind = instance.type_of[node]
        others = max([end for n, end in enumerate(ends) if n != node], default=0.0)
        found = []
        for index, mode in enumerate(instance.modes[job][kind]):
            option = problem.jobs[job].options[mode.option]
            if (option.technique, option.devices) == (a.technique, a.devices):
                continue
            row = [Placed(job, index) if placed.job == job else placed for placed in schedule[node]]
            end = max(others, *(run.end for run in times(instance, node, row)))
            found.append(Alternative(option.technique, option.devices, mode.seconds, mode.area, end))
        reasons.append(Reason(a, tuple(found), _why(a, found, plan.makespan)))
    return Explanation(tuple(reasons), _bounded_by(instance, plan), _utilisation(problem, plan))


def _why(a: Assignment, alternatives: list[Alternative], makespan: float) -> str:
    """One line: the cheapest and the fastest alternative, and why not they."""
    area = a.devices * a.seconds
    if not alternatives:
        return "the only strategy worth having on this node"
    faster = [other for other in alternatives if other.seconds < a.seconds]
    thriftier = [other for other in alternatives if other.device_seconds < area]
    parts = []
    if thriftier:
        other = min(thriftier, key=lambda other: other.makespan)
        late = other.makespan / makespan - 1
        told = (
            f"ends the plan {late:.1%} later"
            if late > 0.0005
            else f"takes {other.seconds / a.seconds:.1f}x as long"
        )
        parts.append(
            f"{other.technique} x {other.devices} saves {1 - other.device_seconds / area:.0%} device-time "
            f"but {told}"
        )
    else:
        parts.append("takes the least device-time")
    if faster:
        other = min(faster, key=lambda other: other.device_seconds)
        parts.append(
            f"{other.technique} x {other.devices} is {1 - other.seconds / a.seconds:.0%} faster "
            f"for {other.device_seconds / area - 1:+.0%} device-time"
        )
    else:
        parts.append("nothing is faster")
    return "; ".join(parts)


def _bounded_by(instance: Instance, plan: Plan) -> str:
    """Which of the bounds is the one that was proven: the longest job, the area, or how jobs fit together."""
    longest = max(instance.classes, key=lambda group: group.earliest_end)
    alone = longest.earliest_end
    area = filled(instance)
    name = instance.problem.jobs[longest.jobs[0]].name
    if alone >= plan.lower_bound * 0.9999:
        return f"the longest job: {name} takes {alone:,.0f} s at its fastest"
    told = f"all jobs at their least device-time would fill every device for {area:,.0f} s"
    if area >= plan.lower_bound * 0.999:
        return f"device-time: {told}"
    assert plan.lower_bound >= simple_bound(instance) * 0.999
    return f"how jobs fit together: {told}, but not without gaps; proven is {plan.lower_bound:,.0f} s"


def _utilisation(problem: Problem, plan: Plan) -> dict[str, float]:
    busy = {node.name: 0.0 for node in problem.nodes}
    for a in plan.assignments:
        busy[a.node] += a.devices * a.seconds
    has = {n.name: sum(max(0.0, plan.makespan - at) for at in problem.free_of(n)) for n in problem.nodes}
    return {name: busy[name] / seconds if seconds else 0.0 for name, seconds in has.items()}
