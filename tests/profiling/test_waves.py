"""Measuring in waves: few trials, and a plan as good as if all had been measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from laws import cluster, job, measure, plan

from saturn_airflow import Cluster, HParams, Job
from saturn_airflow.model import guards
from saturn_airflow.model.estimates import Estimate, Key
from saturn_airflow.profiling import waves
from saturn_airflow.profiling.knowledge import Knowledge
from saturn_airflow.profiling.options import still_known
from saturn_airflow.profiling.trials import strategies, trials_of

pytestmark = pytest.mark.slow

TECHNIQUES = ["even", "frugal", "wide"]
Trial = Callable[[Key, Knowledge], Estimate]


def sweep(
    jobs: Sequence[Job], nodes: Cluster, known: Sequence[Estimate] = (), trial: Trial = measure
) -> tuple[Knowledge, list[list[Key]]]:
    """Measure as a sweep does: what is known in the end, and what each wave measured."""
    found = list(known)
    done = []
    for number in range(1, waves.WAVES + 1):
        knowledge = Knowledge.of(jobs, nodes, TECHNIQUES, found)
        if number == 1:
            wave = waves.first_wave(knowledge) or waves.next_wave(knowledge, plan, worth=waves.WORTH_AGAIN)
        else:
            wave = waves.next_wave(knowledge, plan, last=number == waves.WAVES)
        if not wave:
            break
        done.append(wave)
        found += [trial(key, knowledge) for key in wave]
    return Knowledge.of(jobs, nodes, TECHNIQUES, found), done


def makespan(knowledge: Knowledge, estimates: Any = None) -> float:
    problem = knowledge.problem(knowledge.known if estimates is None else estimates)
    assert problem is not None
    return plan(problem).makespan


def everything(jobs: Sequence[Job], nodes: Cluster) -> Knowledge:
    knowledge = Knowledge.of(jobs, nodes, TECHNIQUES)
    return Knowledge.of(jobs, nodes, TECHNIQUES, [measure(key, knowledge) for key in knowledge.grid])


@settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.tuples(st.sampled_from([0.1, 0.3, 0.9]), st.integers(50, 2000)), min_size=1, max_size=7),
    st.sampled_from([(8,), (4, 2)]),
)
def test_the_plan_is_as_good_as_from_the_full_grid(
    sizes: list[tuple[float, int]], nodes: tuple[int, ...]
) -> None:
    jobs = [job(n, size, batches) for n, (size, batches) in enumerate(sizes)]
    knowledge, done = sweep(jobs, cluster(*nodes))
    best = makespan(everything(jobs, cluster(*nodes)))
    found = makespan(knowledge, waves.estimates_for_plan(knowledge, plan))
    assert found <= 1.02 * best
    assert len({key for wave in done for key in wave}) == sum(map(len, done)), "nothing is measured twice"


def test_a_job_that_is_told_its_techniques_is_measured_beside_one_like_it_that_is_not() -> None:
    free, told = job(0, 0.3, 1000), dataclasses.replace(job(1, 0.3, 5), techniques=["wide"])
    knowledge, done = sweep([free, told], cluster(2, 1))
    assert {key.technique for key in done[0]} == {"even", "wide"}
    problem = knowledge.problem(knowledge.known)
    assert problem is not None
    assert [planned.name for planned in problem.jobs] == ["j0", "j1"]


def test_many_alike_jobs_need_one_device_each_and_few_trials() -> None:
    jobs = [job(n, 0.3, 1000 + n) for n in range(24)]
    knowledge, done = sweep(jobs, cluster(8))
    assert len(done[0]) == 1
    assert sum(map(len, done)) <= 4
    assert len(knowledge.grid) == 8


def test_one_job_alone_is_measured_on_many_devices() -> None:
    knowledge, done = sweep([job(0, 0.9, 2000)], cluster(8))
    assert [(key.technique, key.devices) for key in done[0]] == [("even", 1)]
    assert {key.devices for key in done[-1]} & {6, 7, 8}
    assert makespan(knowledge) <= 1.02 * makespan(everything([job(0, 0.9, 2000)], cluster(8)))


def test_what_earlier_sweeps_measured_is_not_measured_again() -> None:
    jobs = [job(n, size, 400 * n + 200) for n, size in enumerate([0.1, 0.3, 0.9, 0.2])]
    knowledge, _ = sweep(jobs, cluster(4))
    _, again = sweep(jobs, cluster(4), list(knowledge.known.values()))
    assert again == []


def test_speeds_that_are_a_little_off_bring_no_new_trials() -> None:
    jobs = [job(n, size, 400 * n + 200) for n, size in enumerate([0.1, 0.3, 0.9, 0.2])]
    knowledge, _ = sweep(jobs, cluster(4))
    off = [
        dataclasses.replace(e, seconds_per_batch=e.seconds_per_batch * (1.03 if n % 2 else 0.97))
        for n, e in enumerate(knowledge.known.values())
    ]
    assert sweep(jobs, cluster(4), off)[1] == []


def test_a_new_job_is_measured_alone() -> None:
    old = [job(n, 0.3, 1000) for n in range(8)]
    knowledge, _ = sweep(old, cluster(4))
    _, done = sweep([*old, job(9, 0.35, 1000)], cluster(4), list(knowledge.known.values()))
    assert len(done[0]) == 1
    assert knowledge.known.keys().isdisjoint(done[0])


def test_what_training_took_is_not_measured_again() -> None:
    jobs = [job(0, 0.3, 1000)]
    knowledge, _ = sweep(jobs, cluster(2))
    known = [
        dataclasses.replace(e, stale="training took 30% longer") if e.technique == "even" else e
        for e in knowledge.known.values()
    ]
    _, done = sweep(jobs, cluster(2), known)
    assert not any(done)


def test_estimates_of_another_version_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [job(0, 0.3, 1000)]
    knowledge, _ = sweep(jobs, cluster(2))
    from laws import Law

    monkeypatch.setattr(Law, "version", "2")
    renewed = Knowledge.of(jobs, cluster(2), TECHNIQUES, knowledge.known.values())
    assert {e.technique for e in renewed.known.values()} == {"wide"}


@pytest.mark.parametrize("reason", ["out of memory (a card of 8 GiB)", "my own words"])
def test_where_one_device_is_too_small_many_and_the_frugal_are_tried(reason: str) -> None:
    def little_memory(key: Key, knowledge: Knowledge) -> Estimate:
        if key.devices < 4 and key.technique != "frugal":
            return Estimate(**key._asdict(), reason=reason)
        return measure(key, knowledge)

    knowledge, done = sweep([job(0, 0.9, 1000)], cluster(8), trial=little_memory)
    assert [(key.technique, key.devices) for key in done[0]] == [("even", 1)]
    assert {(key.technique, key.devices) for key in done[1]} == {("frugal", 1), ("even", 8), ("wide", 8)}
    assert makespan(knowledge) <= 1.02 * 1000 * 0.9 * 0.16 + 4


def test_where_memory_ran_out_in_training_what_takes_less_is_tried_and_planned() -> None:
    """There was nothing else that night, and the job was lost."""
    big = job(0, 0.9, 1000)
    knowledge, _ = sweep([big], cluster(1))
    assert [key[1:3] for key in knowledge.known] == [("even", 1)]
    verdicts = {guards.mark(big, e.version): guards.ran_out("no room") for e in knowledge.known.values()}
    (known,) = [dataclasses.replace(e, verdicts=verdicts) for e in knowledge.known.values()]
    knowledge, (wave,) = sweep([big], cluster(1), [known])
    assert [(key.technique, key.devices) for key in wave] == [("frugal", 1)]
    planned = knowledge.problem(knowledge.known)
    assert planned is not None
    assert {option.technique for option in planned.jobs[0].options} == {"frugal"}


@pytest.mark.parametrize("refused", [(1,), (2,), (1, 2), (1, 2, 4), (2, 4), (4,)])
def test_what_a_technique_of_ones_own_refuses_says_nothing_of_other_numbers(refused: tuple[int, ...]) -> None:
    def picky(key: Key, knowledge: Knowledge) -> Estimate:
        if key.devices in refused:
            return Estimate(**key._asdict(), reason="does not fit")
        return measure(key, knowledge)

    jobs = [job(n, 0.9, 1000, techniques=["even"]) for n in range(2)]
    knowledge, _ = sweep(jobs, cluster(8), trial=picky)
    blank = Knowledge.of(jobs, cluster(8), TECHNIQUES)
    everything = Knowledge.of(jobs, cluster(8), TECHNIQUES, [picky(key, blank) for key in blank.grid])
    assert makespan(knowledge) <= 1.02 * makespan(everything)


def test_what_ran_out_of_memory_is_not_tried_on_fewer() -> None:
    jobs = [job(0, 0.9, 1000, techniques=["wide"])]
    blank = Knowledge.of(jobs, cluster(8), TECHNIQUES)
    failed = [Estimate(**key._asdict(), reason="out of memory") for key in blank.grid if key.devices == 4]
    assert {key.devices for key in Knowledge.of(jobs, cluster(8), TECHNIQUES, failed).untried()} == {8}


def test_jobs_that_raise_are_not_measured_further() -> None:
    jobs = [job(0, 0.9, 1000), job(1, 0.3, 1000)]
    blank = Knowledge.of(jobs, cluster(2), TECHNIQUES)
    known = [measure(key, blank) for key in waves.first_wave(blank) if "j1" in blank.grid[key].jobs]
    knowledge = Knowledge.of(jobs, cluster(2), TECHNIQUES, known, broken=["j0"])
    wave = waves.next_wave(knowledge, plan)
    assert wave
    assert all("j1" in knowledge.grid[key].jobs for key in wave)


def test_a_number_between_is_planned_with_where_that_makes_the_plan_shorter() -> None:
    jobs = [job(n, 0.9, 1000) for n in range(2)]
    blank = Knowledge.of(jobs, cluster(6), ["even"])
    knowledge = Knowledge.of(jobs, cluster(6), ["even"], [measure(key, blank) for key in blank.grid])
    assert {e.devices for e in knowledge.interpolated().values()} == {3, 5}
    estimates = waves.estimates_for_plan(knowledge, plan)
    assert makespan(knowledge, estimates) < 0.9 * makespan(knowledge)
    one = Knowledge.of(jobs[:1], cluster(6), ["even"], knowledge.known.values())
    assert waves.estimates_for_plan(one, plan) == one.known


def test_trials_are_dealt_out_to_all_nodes_the_widest_first() -> None:
    jobs = [job(n, size, 100) for n, size in enumerate([0.1, 0.2, 0.3])]
    nodes = cluster(4, 4)
    keys, _ = strategies(jobs, nodes, ["even"])
    trials = trials_of(list(keys), keys)
    widths = [trial.devices for trial in trials]
    assert widths == sorted(widths, reverse=True)
    load = {node.name: sum(t.devices for t in trials if t.node == node.name) for node in nodes}
    assert abs(load["n0"] - load["n1"]) <= 4


def test_jobs_alike_share_a_trial() -> None:
    jobs = [job(n, 0.3, 100 + n) for n in range(3)]
    keys, refusals = strategies(jobs, cluster(2), ["even", "wide"])
    assert {(t.technique, t.devices, t.covers) for t in trials_of(list(keys), keys)} == {
        ("even", 1, ("j0", "j1", "j2")),
        ("even", 2, ("j0", "j1", "j2")),
        ("wide", 2, ("j0", "j1", "j2")),
    }
    assert [(r.technique, r.devices, r.reason) for r in refusals] == [("wide", 1, "wide needs two devices")]


@pytest.mark.parametrize(("hparams", "kept"), [({"batches": 9}, True), ({"epochs": 2}, False)])
def test_what_lacks_the_length_of_the_data_is_measured_again(hparams: dict[str, int], kept: bool) -> None:
    jobs = [dataclasses.replace(job(0, 0.3, 1000), hparams=HParams(**hparams))]  # type: ignore[arg-type]
    blank = Knowledge.of(jobs, cluster(2), TECHNIQUES)
    (first, *_) = blank.grid
    works = measure(first, blank, batches_per_epoch=0)
    failed = Estimate(**list(blank.grid)[-1]._asdict(), reason="out of memory")
    assert still_known(jobs, [works, failed]) == ([works, failed] if kept else [failed])
    assert still_known(jobs, [measure(first, blank), failed]) == [measure(first, blank), failed]
