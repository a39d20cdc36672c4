"""What the plan makes of estimates, and what the report learns of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saturn_airflow import Cluster, HParams, Job, Node
from saturn_airflow.deciding.choices import choices, why_nowhere
from saturn_airflow.model import guards
from saturn_airflow.model.entries import PlanEntry, Strategy
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.estimates import Estimate, Key
from saturn_airflow.model.outcomes import Outcome, TimeOnDevices
from saturn_airflow.model.plan import Assignment, Plan
from saturn_airflow.model.problem import PlannedJob, Problem
from saturn_airflow.model.refusals import RefusedStrategy
from saturn_airflow.model.status import Status
from saturn_airflow.operators.actual_speeds import actual_speeds, drifted
from saturn_airflow.operators.report_table import table
from saturn_airflow.operators.report_task import stages
from saturn_airflow.planning.planner import solve
from saturn_airflow.profiling.fingerprints import fingerprint
from saturn_airflow.profiling.options import by_key, options_of

GPUS = Cluster(Node("gpu", 2, kind="a100"))


def job(name: str = "a", **hparams: Any) -> Job:
    return Job(name, "shop.models:gpt2", "shop.data:python_text", hparams=HParams(**{"epochs": 2, **hparams}))


def estimate(technique: str = "single", devices: int = 1, kind: str = "a100", **fields: Any) -> Estimate:
    usual = {"launch_seconds": 5.0, "setup_seconds": 1.0, "seconds_per_batch": 0.5, "batches_per_epoch": 10}
    return Estimate(
        fingerprint=fingerprint(job()), technique=technique, devices=devices, kind=kind, **{**usual, **fields}
    )


def test_an_estimate_counts_all_that_training_does() -> None:
    one = estimate(evaluation_seconds=2.0, ending_seconds=0.25)
    assert one.seconds(20) == 5 + 1 + 20 * 0.5 + 2 * 2.0 + 0.25
    assert one.seconds(21) == 5 + 1 + 21 * 0.5 + 3 * 2.0 + 0.25
    assert estimate(batches_per_epoch=0, evaluation_seconds=2.0).seconds(7) == 5 + 1 + 3.5 + 2.0


def test_launching_is_paid_at_every_start() -> None:
    (option,) = options_of(job(), by_key(estimate()), GPUS)
    assert option.seconds == {"a100": 16.0}
    assert option.setup == 6.0


def test_a_strategy_keeps_to_its_devices_part_of_the_hosts_memory() -> None:
    gib = 2**30
    estimates = by_key(
        estimate("spill", 1, peak_host_bytes=30 * gib),
        estimate("fsdp", 2, peak_host_bytes=30 * gib),
        estimate("single", 1, peak_host_bytes=20 * gib),
    )

    def techniques(*memory: float | None, a_job: Job | None = None) -> list[str]:
        nodes = [Node(f"n{i}", 2, kind="a100", host_memory=gib_there) for i, gib_there in enumerate(memory)]
        return [o.technique for o in options_of(a_job or job(), estimates, Cluster(*nodes))]

    assert techniques(None) == techniques(60.0) == ["spill", "fsdp", "single"]
    assert techniques(59.0) == techniques(100.0, 59.0) == ["fsdp", "single"]
    assert techniques(30.0) == ["fsdp"]
    assert techniques(29.0) == []
    assert techniques(None, 29.0, a_job=dataclasses.replace(job(), nodes=("n0",))) == techniques(None)
    small = Cluster(Node("n0", 2, kind="a100", host_memory=29.0))
    told = why_nowhere(job(), list(estimates.values()), [], cluster=small)
    assert (
        "spill x 1: it took 30.0 GiB of host memory, and its devices' part of node 'n0' is 14.5 GiB" in told
    )
    assert "fsdp x 2: it took 30.0 GiB of host memory, and its devices' part of node 'n0' is 29.0 GiB" in told


@pytest.mark.parametrize("memory", [0, -1, True, "much", float("nan"), float("inf")])
def test_memory_of_a_node_is_a_number(memory: Any) -> None:
    with pytest.raises(InvalidSweepError, match=r"node 'n': host_memory is"):
        Node("n", 2, host_memory=memory)


def test_a_node_says_its_memory_where_it_has_any() -> None:
    assert "host_memory" not in Node("n", 2).to_dict()
    cluster = Cluster(Node("n", 2, host_memory=64))
    assert Cluster.from_dict(cluster.to_dict()) == cluster


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    memory=st.floats(8, 64),
    jobs=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=5),
)
def test_no_plan_takes_more_host_memory_than_there_is(memory: float, jobs: list[tuple[int, int]]) -> None:
    cluster = Cluster(Node("n", 2, kind="a100", host_memory=memory))
    took: dict[tuple[str, str], float] = {}
    planned = []
    for number, (narrow, wide) in enumerate(jobs):
        name = f"job{number}"
        estimates = [
            estimate("single", 1, peak_host_bytes=narrow * 2**30),
            estimate("ddp", 2, seconds_per_batch=0.3, peak_host_bytes=wide * 2**30),
        ]
        took |= {(name, e.technique): e.peak_host_bytes / 2**30 for e in estimates}
        if options := options_of(job(name), by_key(*estimates), cluster):
            planned.append(PlannedJob(name, options))
    if not planned:
        return
    plan = solve(Problem("p", cluster.nodes, tuple(planned)), time_limit=0.2)
    for at in {assignment.start for assignment in plan.assignments}:
        running = [a for a in plan.assignments if a.start <= at < a.end]
        assert sum(took[a.job, a.technique] for a in running) <= memory * (1 + 1e-9)


def test_what_the_plan_page_needs_of_each_job() -> None:
    said = {guards.mark(job(), "1"): "distribution"}
    differs = {guards.mark(job(), "1"): "refused: tensor x 2 changes the result: the loss is off"}
    estimates = by_key(
        estimate(launch_seconds=0.0, verdicts=said),
        estimate("ddp", 2, launch_seconds=0.0, seconds_per_batch=0.3, source="interpolated", uncertainty=0.1),
        estimate("fsdp", 2, reason="out of memory", seconds_per_batch=0.0),
        estimate("tensor", 2, launch_seconds=0.0, verdicts=differs),
    )
    jobs = {"a": job("a"), "b": dataclasses.replace(job("b"), trust=("ddp",))}
    problem = Problem(
        "p", GPUS.nodes, tuple(PlannedJob(n, options_of(j, estimates, GPUS)) for n, j in jobs.items())
    )
    plan = Plan(
        "p",
        "makespan",
        11.0,
        11.0,
        0.1,
        tuple(Assignment(n, "single", 1, "gpu", (i,), 0.0, 11.0) for i, n in enumerate("ab")),
    )
    refusals = [
        {"fingerprint": fingerprint(job()), "technique": "ddp", "devices": 1, "kind": "a100", "reason": "no"}
    ]
    found = choices(problem, plan, jobs, estimates, refusals)
    assert found.keys() == {"a", "b"}
    ddp, fsdp, single, tensor = found["a"]["options"]
    assert single["verdict"] == "equal in distribution: its random numbers are others"
    assert [ddp["verdict"], found["b"]["options"][0]["verdict"]] == [
        "not compared yet",
        "not compared: the job trusts it",
    ]
    assert tensor["reason"] == "tensor x 2 changes the result: the loss is off"
    assert (tensor["seconds"], single["reason"]) == (None, None)
    assert (single["chosen"], ddp["chosen"]) == (True, False)
    assert (single["seconds"], ddp["seconds"]) == (11.0, 7.0)
    assert (ddp["source"], ddp["uncertainty"], ddp["makespan"]) == ("interpolated", 0.1, 18.0)
    assert (fsdp["reason"], fsdp["seconds"]) == ("out of memory", None)
    assert found["a"]["refused"] == refusals
    assert "ddp x 2" in found["a"]["why"]


def test_a_fresh_measurement_adds_to_what_training_said() -> None:
    trained = estimate(batches=200, seconds_per_batch=0.6, ending_seconds=2.0, stale="off", source="history")
    both = trained.joined(estimate(batches=50, seconds_per_batch=0.5))
    assert both.seconds_per_batch == pytest.approx(0.58)
    assert (both.batches, both.ending_seconds, both.stale, both.source) == (250, 2.0, None, "measured")
    other = estimate(parameters={"micro_batches": 4})
    assert trained.joined(other) == other
    failed = estimate(reason="out of memory")
    assert trained.joined(failed) == failed
    assert failed.joined(other) == other


def test_why_nothing_is_planned_where_nothing_may_be_measured() -> None:
    assert "profile='never'" in why_nowhere(job(), [], [], "never")
    failed = [estimate(reason="out of memory", seconds_per_batch=0.0)]
    assert "single x 1: out of memory" in why_nowhere(job(), failed, [], "never")


def outcome(name: str = "a", **fields: Any) -> Outcome:
    usual = {
        "job": name,
        "status": "finished",
        "fingerprint": fingerprint(job()),
        "technique": "single",
        "devices": 1,
        "kind": "a100",
        "parameters": {},
        "ready_seconds": 0.5,
        "setup_seconds": 1.0,
        "seconds_per_batch": 0.5,
        "evaluation_seconds": 2.0,
        "spread": 0.1,
        "batches": 20,
        "steps": 20,
        "batches_per_epoch": 10,
        "peak_device_bytes": 10,
        "peak_host_bytes": 20,
        "planned_seconds": 16.0,
        "started_at": 100.0,
        "ended_at": 116.0,
        "actual_seconds": 16.0,
        "loss": 1.0,
    }
    return Outcome.from_dict({**usual, **fields})


def entry(name: str = "a", seconds: float = 0.5) -> PlanEntry:
    return PlanEntry(
        job=job(name),
        technique="single",
        devices=1,
        node="gpu",
        device_ids=(0,),
        start=0.0,
        end=16.0,
        kind="a100",
        fingerprint=fingerprint(job(name)),
        attempt=100.0,
        position=0,
        seconds_per_batch=seconds,
        version="3",
    )


def test_what_training_took_is_what_the_next_plan_takes() -> None:
    (seen,) = actual_speeds([outcome()], [entry()])
    assert seen.key == Key(fingerprint(job()), "single", 1, "a100")
    assert (seen.version, seen.stale, seen.launch_seconds) == ("3", None, 0.5)
    assert seen.ending_seconds == pytest.approx(16.0 - 0.5 - 1.0 - 10.0 - 4.0)
    (on_cpu,) = actual_speeds([outcome(kind="cpu")], [entry()])
    assert on_cpu.seconds(20) == pytest.approx(16.0)


def test_what_came_to_nothing_before_is_no_part_of_how_training_ends() -> None:
    """As a guard, or tries that were lost or refused before they had saved anything."""
    (usual,) = actual_speeds([outcome(before_seconds=0.5)], [entry()])
    (again,) = actual_speeds([outcome(before_seconds=100.5, actual_seconds=116.0, ended_at=216.0)], [entry()])
    assert usual.ending_seconds == again.ending_seconds == pytest.approx(0.5)
    assert Outcome.from_dict(outcome(before_seconds=7.0).to_dict()).held == TimeOnDevices(
        started_at=100.0, ended_at=116.0, actual_seconds=16.0, before_seconds=7.0
    )


def test_a_technique_that_tells_no_steps_teaches_what_a_start_costs() -> None:
    untold: dict[str, Any] = dict.fromkeys(
        ("seconds_per_batch", "batches", "steps", "batches_per_epoch", "evaluation_seconds")
    )
    finished = outcome(**untold, ready_seconds=None, setup_seconds=None, spread=None, peak_device_bytes=None)
    assert finished.speed is None
    planned = dataclasses.replace(entry(), batches=20)
    (seen,) = actual_speeds([finished], [planned])
    assert (seen.seconds_per_batch, seen.ending_seconds) == (0.5, pytest.approx(6.0))  # type: ignore[comparison-overlap]
    assert seen.seconds(20) == pytest.approx(16.0)
    faster = actual_speeds([finished], [dataclasses.replace(planned, seconds_per_batch=2.0)])[0]
    assert faster.seconds(20) == pytest.approx(16.0)
    long = TimeOnDevices(started_at=0, ended_at=36010, actual_seconds=36000)  # beside a clock that is slewed
    assert actual_speeds([dataclasses.replace(finished, held=long)], [planned])
    paused = dataclasses.replace(finished, held=TimeOnDevices(started_at=0, ended_at=90, actual_seconds=16))
    for unclear in (paused, dataclasses.replace(finished, status=Status.FAILED)):
        assert actual_speeds([unclear], [planned]) == []
    assert actual_speeds([finished], [entry()]) == []


def test_jobs_that_train_alike_are_one_observation() -> None:
    seen = actual_speeds([outcome("a"), outcome("b", seconds_per_batch=0.7, batches=60, steps=60)])
    assert len(seen) == 1
    assert seen[0].seconds_per_batch == pytest.approx((0.5 * 20 + 0.7 * 60) / 80)
    assert seen[0].batches == 80
    assert len(actual_speeds([outcome("a"), outcome("b", parameters={"x": 1})])) == 2


@pytest.mark.parametrize(("seconds", "off"), [(0.5, False), (0.44, False), (0.4, True), (0.6, True)])
def test_a_speed_that_is_far_off_is_told(seconds: float, off: bool) -> None:
    speeds = actual_speeds([outcome()], [entry(seconds=seconds)])
    assert (speeds[0].stale is not None) == off
    told = drifted(speeds, [job("a"), job("b", lr=0.5), job("c", batch_size=3)])
    assert [d["jobs"] for d in told] == ([["a", "b"]] if off else [])
    result = {"best": None, "drifted": told}
    assert ("the next plan goes by what training took" in table(result, [outcome()])) == off


def test_what_trained_otherwise_than_planned_is_no_drift() -> None:
    planned = dataclasses.replace(
        entry(seconds=0.1),
        strategies=(Strategy(technique="pipeline", devices=2, version="7"),),
        instead=(Strategy(technique="single", devices=1, version="8"),),
    )
    (seen,) = actual_speeds([outcome(technique="pipeline", devices=2, verdict="exact")], [planned])
    assert (seen.technique, seen.version, seen.stale) == ("pipeline", "7", None)
    assert seen.verdicts == {guards.mark(planned.job, "7"): "exact"}
    elsewhere = dataclasses.replace(planned, technique="ddp", devices=2)
    assert actual_speeds([outcome()], [elsewhere])[0].version == "8"


def test_a_strategy_that_was_refused_in_training_is_known_to_the_next_plan() -> None:
    planned = dataclasses.replace(entry(), technique="ddp", devices=2)
    refusal = {"technique": "ddp", "devices": 2, "reason": "it differs", "status": "changes_result"}
    refusal |= {"version": "3", "seconds": 0.7}
    for fields in ({}, {"status": "changes_result", "reason": "it differs"}):
        one = outcome(**fields, refusals=[refusal])
        assert Outcome.from_dict(one.to_dict()) == one
        for entries, seconds in (([planned], 0.5), ([entry()], 0.7)):  # a later round planned otherwise
            known = {seen.key.technique: seen for seen in actual_speeds([one, one], entries)}
            assert known["ddp"].verdicts == {guards.mark(planned.job, "3"): "refused: it differs"}
            assert (known["ddp"].version, known["ddp"].seconds_per_batch) == ("3", seconds)
            assert ("single" in known) == (one.status == Status.FINISHED)
        assert "it differs" in table({"best": None, "drifted": []}, [one])


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("ddp x 2 changes the result: the loss is off", "it changes the result: the loss is off"),
        ("the loss is off", "the loss is off"),
        ("ddp x 20 changes the result", "ddp x 20 changes the result"),
    ],
)
def test_a_refusal_names_its_strategy_once(reason: str, words: str) -> None:
    refusal = RefusedStrategy(technique="ddp", devices=2, reason=reason)
    assert refusal.in_words == f"ddp x 2 is refused: {words}"


def test_what_ran_out_of_memory_in_training_is_known_to_the_next_plan_of_such_jobs_alone() -> None:
    planned = dataclasses.replace(entry(), technique="ddp", devices=2)
    ran_out = {"technique": "ddp", "devices": 2, "reason": "OutOfMemoryError: no room"}
    ran_out |= {"status": "out_of_memory", "version": "3", "parameters": {}}
    went_on = outcome(refusals=[ran_out])
    beside = outcome("b", technique="ddp", devices=2, verdict="exact")
    strategies = (Strategy(technique="ddp", devices=2, version="3"),)
    entries = [
        dataclasses.replace(planned, strategies=strategies),
        dataclasses.replace(planned, job=job("b")),
    ]
    seen = actual_speeds([went_on, beside], entries)
    assert [e.key.technique for e in seen] == ["single", "ddp"]
    (verdict,) = {e.key.technique: e for e in seen}["ddp"].verdicts.values()
    assert verdict == "refused: memory ran out in training (OutOfMemoryError: no room)"
    known = by_key(*seen)
    assert [o.technique for o in options_of(job(), known, GPUS)] == ["single"]
    trusting = dataclasses.replace(job(), trust=("ddp",))
    assert [o.technique for o in options_of(trusting, known, GPUS)] == ["single"], "trust is in its results"
    (ddp,) = [e for e in seen if e.technique == "ddp"]
    (left,) = options_of(job(), by_key(ddp), GPUS)
    assert left.technique == "ddp", "nothing else is known, and the data may be others today"
    other = dataclasses.replace(job(), data_version="2")
    assert {o.technique for o in options_of(other, known, GPUS)} == {"single", "ddp"}


@pytest.mark.parametrize(
    ("planned", "trained", "kept"),
    [
        ("here", "here", True),
        ("here", None, True),
        ("here", "at the node", False),
        ("before", "before", False),
        ("before", "here", False),
        ("", "at the node", True),  # who plans has not the code
    ],
)
def test_a_verdict_on_other_code_than_is_here_now_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, planned: str, trained: str | None, kept: bool
) -> None:
    monkeypatch.setattr(guards, "own_code", lambda job: "here")
    one = dataclasses.replace(entry(), own_code=planned)
    exact = outcome(verdict="exact", own_code=trained)
    assert any(e.verdicts for e in actual_speeds([exact], [one])) == kept
    refusal = RefusedStrategy(technique="single", devices=1, reason="it differs").to_dict()
    refused = outcome(status="changes_result", reason="it differs", own_code=trained, refusals=[refusal])
    assert any(e.verdicts for e in actual_speeds([refused], [one])) == kept


def test_noise_is_no_drift() -> None:
    jobs = [outcome("a", seconds_per_batch=0.5), outcome("b", seconds_per_batch=0.9)]
    entries = [entry("a"), entry("b")]
    assert actual_speeds(jobs, entries)[0].stale is None
    jobs[0] = outcome("a", seconds_per_batch=0.7)
    assert "+60% against the estimate" in (actual_speeds(jobs, entries)[0].stale or "")


def test_the_report_says_what_measuring_took() -> None:
    found = stages({"trials": 4, "known": 0, "seconds": 30.0}, 120.0)
    assert found["profile_share"] == 0.25
    text = table({"best": None, **found}, [outcome()])
    assert "4 trials took 30 s, 25% of the sweep's 120 s" in text
    assert stages(None, 9.0) == {"sweep_seconds": 9.0}
