"""Small problems, drawn at random, and their optimum by trying everything."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path

from hypothesis import strategies as st
from plan_checker import faults

from saturn_airflow.model.cluster import Node
from saturn_airflow.model.plan import Plan
from saturn_airflow.model.problem import Option, PlannedJob, Problem

INSTANCES = Path(__file__).parents[2] / "benchmarks" / "instances"


def assert_valid(problem: Problem, plan: Plan) -> None:
    assert faults(problem.to_dict(), plan.to_dict()) == []


@st.composite
def problems(draw: st.DrawFn, *, most_jobs: int = 4, releases: bool = True, busy: bool = True) -> Problem:
    """Up to three nodes of up to 4 devices, two kinds, some busy at first; jobs of up to three strategies,
    some bound."""
    kinds = draw(st.sampled_from([("a",), ("a", "b")]))
    nodes = [
        Node(f"n{i}", draw(st.integers(1, 4)), draw(st.sampled_from(kinds)))
        for i in range(draw(st.integers(1, 3)))
    ]
    present = sorted({node.kind for node in nodes})
    whole = draw(st.booleans())
    seconds = st.integers(1, 12) if whole else st.floats(0.5, 12, allow_nan=False)
    jobs: list[PlannedJob] = []
    for j in range(draw(st.integers(1, most_jobs))):
        if jobs and draw(st.booleans()):  # type: ignore[arg-type]
            # Equal jobs are one class: they must not be mixed up.
            twin = draw(st.sampled_from(jobs))
            jobs.append(PlannedJob(f"j{j}", twin.options, twin.nodes, twin.release, twin.weight))
            continue
        home = draw(st.sampled_from(nodes))
        widths = {draw(st.integers(1, home.devices)), *draw(st.sets(st.integers(1, 4), max_size=2))}
        options = []
        for width in sorted(widths):
            for_kinds = {home.kind, *draw(st.sets(st.sampled_from(present)))}
            options.append(Option(f"t{width}", width, {kind: draw(seconds) for kind in sorted(for_kinds)}))
        bound = draw(st.sampled_from([None, None, (home.name,)]))
        release = draw(st.sampled_from([0, 0, 3])) if releases else 0
        jobs.append(
            PlannedJob(f"j{j}", tuple(options), bound, release, draw(st.sampled_from([1.0, 1.0, 2.5])))
        )
    moments = st.sampled_from([0, 0, 1, 2, 7, 100]) if whole else st.floats(0, 15, allow_nan=False)
    asked = busy and draw(st.booleans())
    late = draw(st.sets(st.sampled_from([node.name for node in nodes]))) if asked else set()
    free = {n.name: tuple(draw(moments) for _ in range(n.devices)) for n in nodes if n.name in late}
    return Problem("drawn", tuple(nodes), tuple(jobs), free)


Ends = list[tuple[PlannedJob, float, float]]
"""Job, device-seconds and end of each."""


def every_schedule(problem: Problem) -> Iterator[Ends]:
    """Every schedule in which each job, in some order, starts as early as its node's devices allow."""

    def place(left: tuple[PlannedJob, ...], free: dict[str, list[float]], done: Ends) -> Iterator[Ends]:
        if not left:
            yield done
        for at, job in enumerate(left):
            rest = left[:at] + left[at + 1 :]
            for node in problem.nodes:
                for option in job.options:
                    if not problem.fits(job, option, node):
                        continue
                    devices = sorted(free[node.name])
                    start = max(devices[option.devices - 1], job.release)
                    end = start + option.seconds[node.kind]
                    idle = [f for f in devices if f <= start]
                    kept = idle[: len(idle) - option.devices] + devices[len(idle) :]
                    then = {**free, node.name: kept + [end] * option.devices}
                    area = option.devices * option.seconds[node.kind]
                    yield from place(rest, then, [*done, (job, area, end)])

    yield from place(problem.jobs, {node.name: list(problem.free_of(node)) for node in problem.nodes}, [])


def optimum(problem: Problem, cost: Callable[[Ends], float]) -> float:
    """The least cost of any schedule."""
    return min((cost(ends) for ends in every_schedule(problem)), default=math.inf)


def makespan(ends: Ends) -> float:
    return max(end for _, _, end in ends)


def mean_completion(ends: Ends) -> float:
    return sum(job.weight * end for job, _, end in ends) / sum(job.weight for job, _, _ in ends)


def device_time_by(deadline: float) -> Callable[[Ends], float]:
    def cost(ends: Ends) -> float:
        return sum(area for _, area, _ in ends) if makespan(ends) <= deadline else math.inf

    return cost
