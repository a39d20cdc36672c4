"""The planner's parts, each held to what it promises."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planning_problems import INSTANCES, assert_valid, makespan, optimum, problems

from saturn_airflow.model.cluster import Node
from saturn_airflow.model.plan import Plan
from saturn_airflow.model.problem import Option, PlannedJob, Problem
from saturn_airflow.planning.clock import Clock
from saturn_airflow.planning.exact_search import sharings
from saturn_airflow.planning.exact_search.node_packing import NotSettledError, Packer
from saturn_airflow.planning.exact_search.proofs import Climb, Descent
from saturn_airflow.planning.heuristics import annealing, ejection_pool
from saturn_airflow.planning.heuristics.ejection_pool import PoolSearch
from saturn_airflow.planning.heuristics.list_scheduling import list_schedule
from saturn_airflow.planning.heuristics.tree_packing import TreePacker
from saturn_airflow.planning.incumbent import Incumbent
from saturn_airflow.planning.instances.instance import Instance, group
from saturn_airflow.planning.instances.schedule import (
    Placed,
    Schedule,
    assignments,
    colour,
    left_shift,
    times,
)
from saturn_airflow.planning.instances.schedule import makespan as ends_at
from saturn_airflow.planning.lower_bounds import dual_feasible
from saturn_airflow.planning.objectives import PlanObjective

many = settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
some = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))


@many
@given(st.lists(st.floats(0.001, 1.0), min_size=1, max_size=7))
def test_dual_feasible_functions_keep_what_fits_within_one(values: list[float]) -> None:
    total = sum(values)
    fitting = [value / max(total, 1.0) for value in values]
    for u in dual_feasible.family([*fitting, 1 - fitting[0], 0.5]):
        assert all(0 <= u(x) <= 1 for x in fitting)
        assert sum(u(x) for x in fitting) <= 1 + 1e-6


@many
@given(st.lists(st.integers(1, 8), min_size=1, max_size=8))
def test_dual_feasible_functions_of_device_counts(widths: list[int]) -> None:
    total = max(8, sum(widths))
    for u in dual_feasible.family([width / total for width in widths]):
        assert sum(u(width / total) for width in widths) <= 1 + 1e-9


def drawn_schedule(instance: Instance, rng: random.Random) -> Schedule:
    """All jobs in random order, on random nodes, under random modes."""
    schedule: Schedule = [[] for _ in instance.problem.nodes]
    for job in rng.sample(range(len(instance.modes)), len(instance.modes)):
        able = [node for node, kind in enumerate(instance.type_of) if instance.modes[job][kind]]
        node = rng.choice(able)
        mode = rng.randrange(len(instance.modes[job][instance.type_of[node]]))
        schedule[node].append(Placed(job, mode))
    return schedule


def as_plan(instance: Instance, schedule: Schedule) -> Plan:
    return Plan("drawn", "makespan", ends_at(instance, schedule), 0.0, 0.0, assignments(instance, schedule))


@many
@given(problems(most_jobs=8), st.randoms(use_true_random=False))
def test_any_order_is_a_valid_plan(problem: Problem, rng: random.Random) -> None:
    instance = group(problem)
    assert_valid(problem, as_plan(instance, drawn_schedule(instance, rng)))


@many
@given(problems(most_jobs=8), st.randoms(use_true_random=False))
def test_left_shift_delays_no_job_and_settles(problem: Problem, rng: random.Random) -> None:
    instance = group(problem)
    for node, row in enumerate(drawn_schedule(instance, rng)):
        before = {run.job: run.start for run in times(instance, node, row)}
        shifted = left_shift(instance, node, row)
        after = {run.job: run.start for run in times(instance, node, shifted)}
        assert after.keys() == before.keys()
        assert all(after[job] <= before[job] for job in before)
        assert left_shift(instance, node, shifted) == shifted


@many
@given(st.integers(1, 9), st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9), st.integers(1, 9))))
def test_colouring_gives_each_job_devices_of_its_own(
    devices: int, wanted: list[tuple[int, int, int]]
) -> None:
    spans: list[tuple[float, float, int]] = []
    for start, length, width in sorted(wanted):
        running = sum(w for s, e, w in spans if s <= start < e)
        if running + width <= devices:
            spans.append((start, start + length, width))
    ids = colour(spans, [0.0] * devices)
    for (start, end, width), own in zip(spans, ids, strict=True):  # type: ignore[assignment]
        assert len(set(own)) == width
        assert set(own) <= set(range(devices))
        for (s, e, _), other in zip(spans, ids, strict=True):
            if own is not other and s < end and start < e:
                assert not set(own) & set(other)


@pytest.mark.slow
@some
@given(problems(most_jobs=4), st.floats(0.8, 1.2))
def test_exact_finds_a_schedule_where_there_is_one_and_only_there(problem: Problem, share: float) -> None:
    instance = group(problem)
    shortest = optimum(problem, makespan)
    end = shortest * (share if abs(share - 1) > 1e-3 else 1.001)
    found = sharings.schedule_by(instance, end, Clock(60))
    assert (found is not None) == (end > shortest)
    if found is not None:
        assert ends_at(instance, found) <= end * (1 + 1e-9)
        assert_valid(problem, as_plan(instance, found))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shortest"), [("txt-1x8", 83054), ("img-2x8", 44551), ("img-8-4-4", 44617)])
def test_exact_settles_the_paper_workloads_to_the_second(name: str, shortest: float) -> None:
    instance = group(Problem.read(INSTANCES / f"{name}.json"))
    found = sharings.schedule_by(instance, shortest, Clock(120))
    assert found is not None
    assert ends_at(instance, found) == shortest
    assert sharings.schedule_by(instance, shortest - 0.5, Clock(120)) is None


def test_a_list_leaves_room_for_jobs_that_are_bound_to_a_node() -> None:
    nodes = (Node("a", 2, kind="cpu"), Node("b", 2, kind="cpu"))
    bound = [PlannedJob(f"bound-{n}", (Option("single", 1, {"cpu": 50}),), nodes=("a",)) for n in (1, 2)]
    free = PlannedJob("free", (Option("single", 1, {"cpu": 60}),))
    instance = group(Problem("x", nodes, (*bound, free)))
    assert ends_at(instance, list_schedule(instance, 60, Clock(10))) == 60


def test_a_list_leaves_room_for_jobs_that_few_nodes_can_end_in_time() -> None:
    narrow = [PlannedJob(f"narrow-{n}", (Option("t", 1, {"cpu": 20}),)) for n in range(2)]
    wide = [PlannedJob(f"wide-{n}", (Option("t", 1, {"cpu": 40}), Option("t", 4, {"cpu": 10}))) for n in "ab"]
    nodes = (Node("large", 4, "cpu"), Node("small-1", 1, "cpu"), Node("small-2", 1, "cpu"))
    instance = group(Problem("x", nodes, (*narrow, *wide)))
    assert ends_at(instance, list_schedule(instance, 17, Clock(10))) == 20


def test_a_list_begins_long_jobs_as_they_are_released() -> None:
    seconds_and_releases = [(10, 0), (10, 1), (10, 1), (30, 2)]
    jobs = [
        PlannedJob(f"j{n}", (Option("t", 1, {"cpu": seconds}),), release=release)
        for n, (seconds, release) in enumerate(seconds_and_releases)
    ]
    instance = group(Problem("x", (Node("a", 2, "cpu"),), tuple(jobs)))
    assert ends_at(instance, list_schedule(instance, 32, Clock(10))) == 32


@many
@given(problems(), st.randoms(use_true_random=False))
def test_annealing_times_rows_as_schedules_are_timed(problem: Problem, rng: random.Random) -> None:
    instance = group(problem)
    schedule = drawn_schedule(instance, rng)
    arrays, state = annealing._problem(instance), annealing._state(instance, schedule)
    energies = annealing._row_energies(arrays, annealing.completion_energy(1.0, 1), state)
    for node, row in enumerate(schedule):
        runs = times(instance, node, row)
        weights = [problem.jobs[run.job].weight for run in runs]
        ends = sum(weight * run.end for weight, run in zip(weights, runs, strict=True))
        assert energies[node] == pytest.approx([ends, max((run.end for run in runs), default=0)])


@many
@given(problems(), st.randoms(use_true_random=False))
def test_annealing_leaves_out_modes_that_no_better_schedule_has(problem: Problem, rng: random.Random) -> None:
    instance = group(problem)
    one, other = sorted((drawn_schedule(instance, rng) for _ in range(2)), key=lambda s: ends_at(instance, s))
    arrays, state = annealing._problem(instance), annealing._state(instance, other)
    annealing._leave_out_late_modes(arrays, state, ends_at(instance, other))
    if ends_at(instance, one) < ends_at(instance, other):
        for node, row in enumerate(one):
            assert all(placed.mode >= arrays.firsts[instance.type_of[node], placed.job] for placed in row)
    for node, row in enumerate(annealing._schedule(instance, state)):
        kind = instance.type_of[node]
        for job, mode in row:
            takes = instance.modes[job][kind]
            free = instance.types[kind].free[takes[mode].devices - 1]
            end = max(free, problem.jobs[job].release) + takes[mode].seconds
            assert end < ends_at(instance, other) or mode == len(takes) - 1


def test_annealing_leaves_devices_free_that_have_been_for_long() -> None:
    jobs = [
        PlannedJob("first", (Option("t", 1, {"cpu": 5}),)),
        PlannedJob("late", (Option("t", 1, {"cpu": 10}),), release=6),
        PlannedJob("narrow", (Option("t", 2, {"cpu": 1}),)),
    ]
    instance = group(Problem("x", (Node("a", 3, "cpu"),), tuple(jobs)))
    state = annealing._state(instance, [[Placed(0, 0), Placed(1, 0), Placed(2, 0)]])
    energy = annealing.completion_energy(1.0, 1)
    assert annealing._row_energies(annealing._problem(instance), energy, state)[0, 0] == 5 + 16 + 1


def test_slack_counts_in_packing_by_how_large_its_node_is() -> None:
    options = (Option("t", 1, {"cpu": 10}),)
    nodes = (Node("large", 8, "cpu"), Node("small", 1, "cpu"))
    instance = group(Problem("x", nodes, tuple(PlannedJob(f"j{n}", options) for n in range(3))))
    target = PoolSearch(instance, [[], []], 20.0, random.Random(1), 100).target
    large, small = (ejection_pool._slack_reward(target, node, 0.05) for node in (0, 1))
    assert large == pytest.approx(8 * small)


def test_too_many_sets_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    instance = group(Problem.read(INSTANCES / "distinct20-2x8.json"))
    monkeypatch.setattr(sharings, "_MOST_SETS", 8)
    with pytest.raises(NotSettledError):
        sharings.schedule_by(instance, 100_000, Clock(60))


@some
@given(problems(most_jobs=4))
def test_descending_from_any_schedule_ends_at_the_shortest_and_proves_it(problem: Problem) -> None:
    best = Incumbent(group(problem), PlanObjective(), Clock(60))
    best.offer(list_schedule(best.instance, 0.0, best.clock))
    descent = Descent(best)
    while not best.done:
        descent.run(best.clock.within(0.001))
    assert best.value == pytest.approx(optimum(problem, makespan), rel=1e-7)
    assert best.proven


@some
@given(problems(most_jobs=4))
def test_climbing_never_passes_the_shortest(problem: Problem) -> None:
    shortest = optimum(problem, makespan)
    best = Incumbent(group(problem), PlanObjective(), Clock(60))
    best.offer(list_schedule(best.instance, 0.0, best.clock))
    best.raise_bound(shortest / 2)
    climb = Climb(best)
    while not best.done:
        climb.run(best.clock.within(0.001))
        assert best.bound <= shortest * (1 + 1e-7)
    assert best.value == pytest.approx(shortest, rel=1e-7)


def test_an_incumbent_only_ever_improves() -> None:
    instance = group(twelve_jobs())
    best = Incumbent(instance, PlanObjective(), Clock(10))
    rng = random.Random(1)
    values = []
    for _ in range(20):
        best.offer(drawn_schedule(instance, rng))
        values.append(best.value)
    assert values == sorted(values, reverse=True)
    assert len(set(values)) > 1
    best.raise_bound(best.value * 2)
    assert best.bound == best.value
    best.raise_bound(1.0)
    assert best.bound == best.value


def test_packing_says_when_it_did_not_settle() -> None:
    instance = group(twelve_jobs())
    with pytest.raises(NotSettledError):
        Packer(instance, 0, 200.0).search(tuple(range(12)), effort=2)


def twelve_jobs() -> Problem:
    rng = random.Random(3)
    jobs = []
    for j in range(12):
        base = rng.uniform(20, 90)
        strategies = [
            {"technique": "t", "devices": g, "seconds": {"a": base / g**0.8 * rng.uniform(0.95, 1.05)}}
            for g in (1, 2, 3, 4)
        ]
        jobs.append({"name": f"j{j}", "strategies": strategies})
    nodes = [{"name": f"n{i}", "devices": 4, "kind": "a"} for i in range(3)]
    return Problem.from_dict({"name": "twelve", "nodes": nodes, "jobs": jobs})


@pytest.mark.slow
def test_every_search_improves_on_list_scheduling() -> None:
    problem = twelve_jobs()
    instance = group(problem)
    listed = list_schedule(instance, 0.0, Clock(10))
    before = ends_at(instance, listed)

    pool = PoolSearch(instance, listed, before * 0.99, random.Random(1), effort=400).run(Clock(10))
    assert pool is not None
    assert ends_at(instance, pool) <= before * 0.99 * (1 + 1e-9)

    energy = annealing.makespan_energy(before * 0.9)
    annealed = annealing.anneal(instance, listed, energy, random.Random(1), Clock(1.0), hot=1.0, cold=0.01)
    assert ends_at(instance, annealed) < before

    trees = TreePacker(instance, random.Random(1)).pack(Clock(10), below=before * 1.2)
    assert trees is not None
    for schedule in (listed, pool, annealed, trees):
        assert_valid(problem, as_plan(instance, schedule))


def test_equal_nodes_and_jobs_are_grouped_and_those_bound_elsewhere_are_not() -> None:
    data = twelve_jobs().to_dict()
    data["jobs"][1]["strategies"] = data["jobs"][0]["strategies"]
    assert len(group(Problem.from_dict(data)).classes) == 11
    assert len(group(Problem.from_dict(data)).types) == 1
    data["jobs"][1]["nodes"] = ["n2"]
    bound = group(Problem.from_dict(data))
    assert len(bound.classes) == 12
    assert [kind.nodes for kind in bound.types] == [(0, 1), (2,)]
