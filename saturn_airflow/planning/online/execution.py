"""Simulates a plan, by the rules by which train tasks run, with the seconds that jobs really take.

A job starts when every one of its devices is free of the jobs that the plan puts there before it. A job that
goes on where it runs pays nothing; one that is moved is saved first, and set up anew.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from saturn_airflow.model.plan import Assignment, Place, Plan
from saturn_airflow.model.problem import Option, Problem


@dataclass(frozen=True)
class Situation:
    """A sweep at one moment.

    :param left: by job, the share of its batches that is still to be trained; those that are done are absent.
    :param running: where jobs run at this moment.
    :param setting_up: seconds that running jobs still need until they train.
    """

    left: Mapping[str, float]
    running: Mapping[str, Place] = field(default_factory=dict)
    setting_up: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Stretch:
    """A job on its devices, without a break.

    :param start: seconds, as ``end``.
    :param trained: the share of the job's batches that was trained.
    """

    job: str
    place: Place
    start: float
    end: float
    trained: float


@dataclass(frozen=True)
class Execution:
    """What happened.

    :param stretches: in order of start, in seconds from the beginning.
    :param situation: in which things are then.
    :param end: when the last job ended, or the moment that was waited for.
    :param moved: jobs that were running, and were stopped to run elsewhere or later.
    """

    stretches: tuple[Stretch, ...]
    situation: Situation
    end: float
    moved: tuple[str, ...]


#: A share of a job's batches that is no batch.
_NOTHING = 1e-9


def option_of(problem: Problem, job: str, technique: str, devices: int) -> Option:
    """The strategy of ``job`` with this technique on so many devices."""
    options = next(j.options for j in problem.jobs if j.name == job)
    return next(o for o in options if (o.technique, o.devices) == (technique, devices))


def execute(
    problem: Problem, plan: Plan, situation: Situation, *, until: float = math.inf, checkpoint: float = 0.0
) -> Execution:
    """Simulate ``plan`` from ``situation`` on. Seconds count from now.

    :param problem: with the seconds that jobs take when trained from start to end; set-ups count for each
        launch. Assignments on nodes that it lacks wait for ever, those on devices until these are free.
    :param plan: what is to be done; only its order and places count.
    :param until: the moment at which to stop.
    :param checkpoint: seconds that saving a job takes when it is moved.
    """
    # Assignments in order of start: when one's turn comes, ``free`` has for each of its devices the end of
    # the job before it there.
    kinds = {node.name: node.kind for node in problem.nodes}
    options = {(j.name, o.technique, o.devices): o for j in problem.jobs for o in j.options}
    left = dict(situation.left)
    queue = [a for a in _in_order(plan) if a.job in left and a.node in kinds]
    stays = _staying(queue, situation)
    moved = tuple(sorted(job for job in situation.running if job in left and job not in stays))
    free = _free(problem)
    ready = dict.fromkeys(moved, checkpoint)
    for job in moved:
        place = situation.running[job]
        free.update({(place.node, device): checkpoint for device in place.device_ids})
    stretches, running, setting_up = [], {}, {}
    end = 0.0
    for a in queue:
        place = Place.of(a)
        option = options[a.job, a.technique, a.devices]
        net = option.seconds[kinds[a.node]] - option.setup
        start = max([ready.get(a.job, 0.0), *(free.get((a.node, device), 0.0) for device in a.device_ids)])
        setup = situation.setting_up.get(a.job, 0.0) if a.job in stays else option.setup
        done = start + setup + left[a.job] * net
        free.update({(a.node, device): done for device in a.device_ids})
        # Not started by then, it still keeps its devices from those after it in the plan.
        if start >= until:
            continue
        trained = left[a.job] if done <= until else max(0.0, until - start - setup) / net
        stretches.append(Stretch(a.job, place, start, min(done, until), trained))
        end = max(end, min(done, until))
        left[a.job] -= trained
        if left[a.job] < _NOTHING:
            del left[a.job]
        else:
            running[a.job] = place
            if still := max(0.0, start + setup - until):
                setting_up[a.job] = still
    return Execution(
        tuple(stretches),
        Situation(left, running, setting_up),
        until if left and until < math.inf else end,
        moved,
    )


def keep_places(plan: Plan, problem: Problem, running: Mapping[str, Place]) -> Plan:
    """``plan`` with device ids exchanged so that running jobs it leaves as they are keep their devices.

    :param problem: what the plan is for.
    """
    ordered = _in_order(plan)
    first = [a for a in ordered if a.start == 0 and same_but_ids(a, running.get(a.job))]
    kept = {a.job: running[a.job].device_ids for a in first}
    taken = _free(problem)
    taken.update({(a.node, device): a.end for a in first for device in kept[a.job]})
    size = {node.name: node.devices for node in problem.nodes}
    for place in [*map(Place.of, plan.assignments), *running.values()]:
        size[place.node] = max(size.get(place.node, 0), 1 + max(place.device_ids))
    assigned = []
    for a in ordered:
        if a.job not in kept:
            free = [d for d in range(size[a.node]) if taken.get((a.node, d), 0.0) <= a.start]
            # Of the free ones, those that became free last: chains of jobs stay together.
            free.sort(key=lambda d: (-taken.get((a.node, d), 0.0), d))
            ids = tuple(sorted(free[: a.devices]))
            assert len(ids) == a.devices, "more devices in use than there are"
            taken.update({(a.node, device): a.end for device in ids})
        else:
            ids = kept[a.job]
        assigned.append(dataclasses.replace(a, device_ids=ids))
    return dataclasses.replace(plan, assignments=tuple(assigned))


def _free(problem: Problem) -> dict[tuple[str, int], float]:
    """By node and device, when it becomes free, where that is not now."""
    return {
        (node.name, device): at
        for node in problem.nodes
        for device, at in enumerate(problem.free_of(node))
        if at
    }


def _in_order(plan: Plan) -> list[Assignment]:
    return sorted(plan.assignments, key=lambda a: (a.start, a.end, a.job))


def _staying(queue: list[Assignment], situation: Situation) -> set[str]:
    """Running jobs that are first on all of the devices they run on."""
    used: set[tuple[str, int]] = set()
    found = set()
    for a in queue:
        devices = {(a.node, device) for device in a.device_ids}
        if situation.running.get(a.job) == Place.of(a) and not devices & used:
            found.add(a.job)
        used |= devices
    return found


def same_but_ids(a: Assignment, place: Place | None) -> bool:
    """Whether a job that runs in ``place`` may go on there under ``a``, perhaps on other devices' ids."""
    return place is not None and (a.technique, a.devices, a.node) == (
        place.technique,
        place.devices,
        place.node,
    )
