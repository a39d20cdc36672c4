"""What a plan is judged by. Every objective is minimised."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.problem import Problem
from saturn_airflow.planning.instances.instance import Instance
from saturn_airflow.planning.instances.schedule import Schedule, times

MAKESPAN, MEAN_COMPLETION, DEVICE_TIME = "makespan", "mean-completion", "device-time"
NAMES = (MAKESPAN, MEAN_COMPLETION, DEVICE_TIME)


@dataclass(frozen=True)
class PlanObjective:
    """An objective.

    :param name: one of :data:`NAMES`.
    :param deadline: seconds by which every job must have ended (device-time only).
    """

    name: str = MAKESPAN
    deadline: float = math.inf

    def value(self, instance: Instance, schedule: Schedule) -> float:
        """Seconds, or device-seconds; infinite for a schedule that misses the deadline."""
        if self.name == MEAN_COMPLETION:
            total = weight = 0.0
            for node, row in enumerate(schedule):
                for run in times(instance, node, row):
                    job = instance.problem.jobs[run.job]
                    total += job.weight * run.end
                    weight += job.weight
            return total / weight if weight else 0.0
        end, area = 0.0, 0.0
        for node, row in enumerate(schedule):
            modes = instance.type_of[node]
            for run in times(instance, node, row):
                end = max(end, run.end)
                area += instance.modes[run.job][modes][run.mode].area
        if self.name == MAKESPAN:
            return end
        return area if end <= self.deadline else math.inf

    def just_below(self, instance: Instance, value: float) -> float:
        """What to ask for in order to get less than ``value``: no possible makespan lies between the two.

        Where all seconds are multiples of a unit, so is every makespan, and half a unit less will do.
        """
        unit = _unit(instance.problem)
        return value - unit / 2 if unit else value * (1 - _SOLVER)

    def round_up(self, instance: Instance, bound: float) -> float:
        """The least value that is not below ``bound``: makespans of whole seconds are whole seconds."""
        unit = _unit(instance.problem) if self.name == MAKESPAN else 0
        # What a solver calls 12.0000003 is 12.
        return unit * math.ceil(bound * (1 - _SOLVER) / unit) if unit else bound * (1 - _SOLVER)


def checked(name: str, deadline: float | None) -> PlanObjective:
    """The objective called ``name``.

    :raises InvalidSweepError: for another name, or a deadline that is missing, misplaced or not a time.
    """
    if name not in NAMES:
        raise InvalidSweepError(f"there is no objective {name!r}; choose one of {', '.join(NAMES)}")
    if name == DEVICE_TIME and deadline is None:
        raise InvalidSweepError(
            "the objective device-time needs a deadline: the seconds by which all is done"
        )
    if deadline is None:
        return PlanObjective(name)
    if name != DEVICE_TIME:
        raise InvalidSweepError(f"a deadline goes with the objective device-time, not with {name}")
    if not 0 < deadline < math.inf:
        raise InvalidSweepError(
            f"the deadline is {deadline!r}; give the seconds by which all is done, above 0"
        )
    return PlanObjective(name, deadline)


@lru_cache(maxsize=8)
def _unit_of(seconds: tuple[float, ...]) -> int:
    return math.gcd(*(int(value) for value in seconds)) if all(s == int(s) for s in seconds) else 0


def _unit(problem: Problem) -> int:
    """The greatest whole number that divides all seconds; 0 where they are not whole."""
    times_given = {
        seconds for job in problem.jobs for option in job.options for seconds in option.seconds.values()
    }
    times_given |= {job.release for job in problem.jobs if job.release}
    times_given |= {at for moments in problem.free.values() for at in moments if at}
    return _unit_of(tuple(sorted(times_given)))


#: Relative tolerance of what solvers return.
_SOLVER = 1e-8
