"""What others do with sweeps that arrive: decisions by the rules of queues with fixed numbers of devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from saturn_airflow.model.plan import Assignment, Place
from saturn_airflow.model.problem import PlannedJob, Problem, Way
from saturn_airflow.model.sharing import SharedCluster, SharedJob, SharedSweep, SharingRules
from saturn_airflow.planning.planner import solve
from saturn_airflow.sharing.replay import Decide
from saturn_airflow.sharing.turns import Decision, Turn

Choose = Callable[[PlannedJob], Way]


def efficient(least: float) -> Choose:
    """The widest strategy whose device-seconds are at most 1 / ``least`` times those of the thriftiest."""

    def chosen(job: PlannedJob) -> Way:
        (ways,) = job.ways.values()
        thriftiest = min(way.area(1.0) for way in ways)
        return max((w for w in ways if thriftiest / w.area(1.0) >= least), key=lambda w: w.devices)

    return chosen


@dataclass
class _Free:
    """The devices of a node: when each is free, as far as is expected."""

    name: str
    at: list[float]

    def ids(self, devices: int, now: float) -> tuple[int, ...] | None:
        free = [d for d, at in enumerate(self.at) if at <= now]
        return tuple(free[:devices]) if len(free) >= devices else None


def backfilling(choose: Choose, *, shortest_work: bool) -> Decide:
    """First come first served, or the sweep with the least remaining work first, with EASY backfilling.

    The first job that finds no devices has the earliest node reserved (by the seconds that are expected);
    others start only where they do not delay it (Lifka 1995). Urgent sweeps go first. Nothing that runs is
    stopped.
    """
    fixed: dict[tuple[str, str], Way] = {}

    def way_of(sweep: SharedSweep, job: SharedJob) -> Way:
        key = (sweep.name, job.name)
        if key not in fixed:
            fixed[key] = choose(job.job)
        return fixed[key]

    def work(sweep: SharedSweep) -> float:
        return sum(way_of(sweep, job).area(job.left) for job in sweep.jobs)

    def decide(cluster: SharedCluster, rules: SharingRules) -> Decision:
        now = cluster.now
        nodes = {node.name: _Free(node.name, [now] * node.devices) for node in cluster.nodes}
        for sweep in cluster.sweeps:
            for job in sweep.jobs:
                if job.place is not None:
                    seconds = job.option.seconds["a100"] - job.option.setup
                    # What takes longer than expected may end at any moment.
                    end = now + max(job.setting_up + job.left * seconds, 1.0)
                    for d in job.place.device_ids:
                        nodes[job.place.node].at[d] = end
        order = sorted(
            cluster.sweeps,
            key=lambda s: (-s.priority, work(s) if shortest_work else s.arrived, s.arrived, s.name),
        )
        queue = [
            (s, j, way_of(s, j))
            for s in order
            for j in sorted(s.jobs, key=lambda j: -way_of(s, j).seconds(j.left))
            if j.place is None
        ]
        return Decision(tuple(_easy(queue, nodes, now)))

    return decide


def _easy(
    queue: Sequence[tuple[SharedSweep, SharedJob, Way]], nodes: Mapping[str, _Free], now: float
) -> list[Turn]:
    starts: list[Turn] = []
    reserved: tuple[_Free, float, int] | None = None
    for sweep, job, way in queue:
        end = now + way.seconds(job.left)
        fitting = []
        for node in nodes.values():
            ids = node.ids(way.devices, now)
            if ids is None:
                continue
            if reserved is not None and reserved[0] is node and end > reserved[1]:
                # What is free at the time of the reservation and not needed for it.
                spare = sum(at <= reserved[1] for at in node.at) - reserved[2]
                if way.devices > spare:
                    continue
            fitting.append((sum(at <= now for at in node.at), node.name, node, ids))
        if fitting:
            _, _, node, ids = min(fitting)
            for d in ids:
                node.at[d] = end
            starts.append(
                Turn(sweep.name, job.name, Place(way.option.technique, way.devices, node.name, ids))
            )
        elif reserved is None:
            ready = [
                (sorted(n.at)[way.devices - 1], n.name, n) for n in nodes.values() if len(n.at) >= way.devices
            ]
            at, _, node = min(ready)
            reserved = (node, at, way.devices)
    return starts


def first_planned(plan_seconds: float) -> Decide:
    """Each sweep is planned alone for all devices; a device goes through what was planned on it in turn."""
    lines: dict[str, dict[str, Assignment]] = {}
    order: dict[tuple[str, str], tuple[int, float, str]] = {}

    def plan(sweep: SharedSweep, cluster: SharedCluster) -> None:
        problem = Problem(sweep.name, cluster.nodes, tuple(job.job for job in sweep.jobs))
        found = solve(problem, time_limit=plan_seconds, repeatable=True)
        lines[sweep.name] = {a.job: a for a in found.assignments}
        for a in found.assignments:
            order[sweep.name, a.job] = (len(lines), a.start, a.job)

    def decide(cluster: SharedCluster, rules: SharingRules) -> Decision:
        for sweep in cluster.sweeps:
            if sweep.name not in lines:
                plan(sweep, cluster)
        taken: set[tuple[str, int]] = set()
        starts = []
        jobs = [(order[s.name, j.name], s.name, j) for s in cluster.sweeps for j in s.jobs]
        for _, sweep_name, job in sorted(jobs, key=lambda entry: (entry[2].place is None, entry[0])):
            a = lines[sweep_name][job.name]
            devices = {(a.node, d) for d in a.device_ids}
            if job.place is None and not devices & taken:
                starts.append(Turn(sweep_name, job.name, Place.of(a)))
            taken |= devices
        return Decision(tuple(starts))

    return decide


def least_mean(sweeps: Sequence[SharedSweep], devices: int) -> float:
    """Seconds that the mean completion can't be less than, whatever is known and decided.

    A sweep is done when all its jobs are, so any mean of its jobs' completions is at most its own. Per
    second, at most its least seconds' part of a job is done, so it completes at least half of its least
    seconds after the mean of the moments at which its parts are done; and the weighted sum of those moments
    is least where one machine with all devices always works on what has the largest weight per area
    (Goemans 1996). Of several weightings the best counts, and the mean of what sweeps take alone.
    """
    alone = sum(s.alone for s in sweeps) / len(sweeps)
    return max([alone, *(_mean_busy(sweeps, devices, share) for share in (0.0, 0.25, 0.5, 0.75, 1.0))])


def _mean_busy(sweeps: Sequence[SharedSweep], devices: int, to_longest: float) -> float:
    jobs: list[tuple[float, float, float]] = []  # arrival, seconds of all devices, weight
    total = 0.0
    for s in sweeps:
        areas = [min(w.area(1.0) for ways in j.job.ways.values() for w in ways) for j in s.jobs]
        least = [min(w.seconds(1.0) for ways in j.job.ways.values() for w in ways) for j in s.jobs]
        longest = least.index(max(least))
        for i, (area, seconds) in enumerate(zip(areas, least, strict=True)):
            weight = (1 - to_longest) * area / sum(areas) + (to_longest if i == longest else 0.0)
            total += weight * (seconds / 2 - s.arrived)
            if weight:
                jobs.append((s.arrived, area / devices, weight))
    return (total + _least_busy(jobs)) / len(sweeps)


def _least_busy(jobs: list[tuple[float, float, float]]) -> float:
    """The least weighted sum of mean busy times on one machine that may switch at any time."""
    import heapq

    waiting: list[list[float]] = []
    coming = sorted(jobs)[::-1]
    now, found = 0.0, 0.0
    while waiting or coming:
        if not waiting:
            now = max(now, coming[-1][0])
        while coming and coming[-1][0] <= now:
            arrived, seconds, weight = coming.pop()
            heapq.heappush(waiting, [-weight / seconds, arrived, seconds, weight / seconds])
        first = waiting[0]
        until = min(now + first[2], coming[-1][0] if coming else math.inf)
        found += first[3] * (until - now) * (until + now) / 2
        first[2] -= until - now
        now = until
        if first[2] <= 1e-9:
            heapq.heappop(waiting)
    return found
