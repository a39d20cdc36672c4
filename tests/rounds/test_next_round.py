"""What the next round is, from plain data."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from saturn_airflow import Cluster, HParams, Job, MedianStopping, Node, SuccessiveHalving
from saturn_airflow.deciding import next_round
from saturn_airflow.deciding.next_round import SweepState
from saturn_airflow.deciding.refused_strategies import without_refused
from saturn_airflow.launch.progress import Progress, Speed
from saturn_airflow.launch.runs import Run, RunSpec
from saturn_airflow.model.entries import PlanEntry
from saturn_airflow.model.estimates import Estimate
from saturn_airflow.model.problem import Option, PlannedJob, Problem
from saturn_airflow.model.refusals import RefusedStrategy
from saturn_airflow.model.rounds import Rounds
from saturn_airflow.model.settings import SweepSettings
from saturn_airflow.model.status import Status
from saturn_airflow.planning.warming import warm
from saturn_airflow.profiling.fingerprints import fingerprint
from saturn_airflow.profiling.options import by_key

A, B = Node("a", 1, "cpu"), Node("b", 1, "cpu")
CLUSTER = Cluster(A, B)
MADE = 1000.0


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    warm()


def job(name: str, **fields: Any) -> Job:
    return Job(
        name, "torch.nn:Linear", "torch.utils.data:DataLoader", hparams=HParams(epochs=10), model_args=fields
    )


JOBS = {name: job(name, size=size) for size, name in enumerate(("one", "two", "three"))}
#: Each trains 10 epochs of 10 batches of a second.
ESTIMATES = by_key(
    *(
        Estimate(
            fingerprint=fingerprint(job),
            technique="single",
            devices=1,
            kind="cpu",
            version="1",
            seconds_per_batch=1.0,
            batches_per_epoch=10,
        )
        for job in JOBS.values()
    )
)
PROBLEM = Problem(
    "p",
    CLUSTER.nodes,
    tuple(PlannedJob(name, (Option("single", 1, {"cpu": 100.0}),)) for name in JOBS),
)


def beginning(rounds: int = 3, **settings: Any) -> SweepState:
    made = SweepSettings(
        cluster=CLUSTER, group="s", rounds=Rounds(most=rounds), planning_seconds=1.0, **settings
    )
    return SweepState(settings=made, number=1, problem=PROBLEM, jobs=JOBS, estimates=ESTIMATES)


def planned(
    stand: SweepState, seconds: float | None = None
) -> tuple[next_round.DecidedRound, list[PlanEntry]]:
    going = next_round.who_goes_on(stand)
    decided = next_round.decide_round(stand, stand.problem, going.situation, seconds)
    return decided, next_round.entries_of(stand, stand.problem, decided, CLUSTER, going, MADE)


def at_boundary(stand: SweepState, progress: dict[str, Progress], **more: Any) -> SweepState:
    decided, entries = planned(stand)
    return dataclasses.replace(
        stand,
        number=2,
        plan=decided.adoption.plan,
        before={entry.name: entry for entry in entries},
        progress={name: progress.get(name, Progress()) for name in JOBS},
        standing=(MADE,),
        **more,
    )


def training(folder: Path, entry: PlanEntry, steps: int, technique: str = "single", **more: Any) -> Progress:
    """That of a job that trains where ``entry`` says."""
    place: dict[str, Any] = {"node": entry.node, "devices": entry.devices, "device_ids": entry.device_ids}
    fields: dict[str, Any] = {"technique": technique, "slots": entry.devices, "priority": entry.priority}
    spec = RunSpec(job=entry.job, folder="f", **fields, **place)
    path = folder / entry.name
    path.mkdir()
    (path / "spec.json").write_text(json.dumps(spec.to_dict()))
    return Progress(steps=steps, total=100, per_epoch=10, alive=Run(path), training=True, **more)


def test_a_sweep_that_is_planned_once_has_one_round_without_an_end() -> None:
    decided, entries = planned(beginning(rounds=1))
    assert decided.adoption.length == math.inf
    assert [entry.end for entry in entries] == [100.0, 100.0, 200.0]
    for entry in entries:
        assert (entry.round, entry.ends_at, entry.most_batches) == (None, None, None)
        assert [(s.technique, s.seconds) for s in entry.strategies] == [("single", 100.0)]


@pytest.mark.parametrize("rounds", [1, 3])
def test_what_is_no_faster_is_kept_for_where_the_planned_strategy_is_refused(rounds: int) -> None:
    seconds = {("ddp", 2): 40.0, ("fsdp", 2): 90.0, ("single", 1): 100.0, ("ddp", 4): 90.0}
    options = tuple(Option(technique, n, {"cpu": s}) for (technique, n), s in seconds.items())
    (one,) = (estimate for estimate in ESTIMATES.values() if estimate.fingerprint == fingerprint(JOBS["one"]))
    known = [dataclasses.replace(one, technique=technique, devices=n) for technique, n in seconds]
    cluster = Cluster(Node("a", 4, "cpu"))
    problem = Problem("p", cluster.nodes, (PlannedJob("one", options),))
    begun = dataclasses.replace(beginning(rounds), problem=problem, jobs={"one": JOBS["one"]})
    stand = dataclasses.replace(begun, estimates=by_key(*known))
    going = next_round.who_goes_on(stand)
    decided = next_round.decide_round(stand, problem, going.situation, None)
    (entry,) = next_round.entries_of(stand, problem, decided, cluster, going, MADE)
    assert (entry.technique, entry.devices) == ("ddp", 2)
    assert {(s.technique, s.devices): s.seconds for s in entry.instead} == {
        ("single", 1): 100.0,
        ("fsdp", 2): 90.0,
    }
    assert len(entry.strategies) == (2 if rounds == 1 else 1)
    assert PlanEntry.from_dict(json.loads(json.dumps(entry.to_dict()))) == entry


def test_the_first_of_several_rounds_has_the_same_plan_and_an_end() -> None:
    once, several = planned(beginning(rounds=1)), planned(beginning(rounds=3))
    assert once[0].adoption.plan.assignments == several[0].adoption.plan.assignments
    assert [entry.round for entry in several[1]] == [1, 1, 1]
    assert {entry.ends_at for entry in several[1]} == {MADE + 0.4 * 200.0}


def test_the_last_round_trains_to_the_end_whatever_the_policy() -> None:
    stand = dataclasses.replace(beginning(rounds=1), number=1)
    assert stand.is_last
    assert planned(stand)[0].adoption.length == math.inf


@pytest.mark.slow
def test_at_a_boundary_jobs_that_train_stay_and_what_is_done_is_left_out(tmp_path: Path) -> None:
    first = beginning()
    _, (one, two, three) = planned(first)
    progress = {
        one.name: training(tmp_path, one, 50),
        two.name: Progress(steps=100, total=100, status="finished"),
    }
    stand = at_boundary(first, progress, statuses={two.name: Status.FINISHED})
    going = next_round.who_goes_on(stand)
    assert set(going.jobs) == {one.name, three.name}
    assert going.situation.left == {one.name: 0.5, three.name: 1.0}
    nodes = {one.name: (one.node,), three.name: None}
    left = tuple(
        dataclasses.replace(j, nodes=nodes[j.name]) for j in PROBLEM.jobs if j.name in going.situation.left
    )
    now = dataclasses.replace(PROBLEM, jobs=left)
    decided = next_round.decide_round(stand, now, going.situation, None)
    entries = next_round.entries_of(stand, now, decided, CLUSTER, going, MADE + 50)
    by_name = {entry.name: entry for entry in entries}
    assert by_name[one.name].goes_on == one.priority
    assert by_name[one.name].place == one.place
    assert by_name[three.name].goes_on is None
    # What others are told of it is how much of all is left, and the seconds of all.
    assert by_name[one.name].planned_seconds == pytest.approx(50.0)
    assert {strategy.seconds for entry in entries for strategy in entry.strategies} == {100.0}
    assert {entry.name: entry.elsewhere for entry in entries} == {one.name: 100.0, three.name: 50.0}
    assert {entry.round for entry in entries} == {2}
    assert {entry.standing for entry in entries} == {(MADE,)}


@pytest.mark.parametrize("status", [Status.FAILED, Status.NOT_A_NUMBER, Status.TIMED_OUT])
def test_what_failed_for_good_is_over(status: Status) -> None:
    stand = at_boundary(beginning(), {}, statuses={"one": status})
    assert set(next_round.who_goes_on(stand).jobs) == {"two", "three"}


def test_a_job_that_finished_after_its_task_was_lost_is_concluded_by_this_round() -> None:
    stand = at_boundary(beginning(), {"one": Progress(status="finished")})
    going = next_round.who_goes_on(stand)
    assert going.unfollowed == ("one",)
    entry = next_round.without_place(stand, "one", MADE + 50, 7)
    assert (entry.round, entry.attempt, entry.position, entry.standing) == (2, MADE + 50, 7, (MADE,))
    concluded = dataclasses.replace(stand, statuses={"one": Status.FINISHED})
    assert next_round.who_goes_on(concluded).unfollowed == ()


@pytest.mark.slow
def test_a_selection_drops_the_worst_with_what_it_had() -> None:
    rule = MedianStopping("epoch_loss", min_jobs=1)
    history = {name: {"epoch_loss": {1.0: loss}} for name, loss in zip(JOBS, (0.1, 0.2, 9.0), strict=True)}
    progress = {name: Progress(steps=10, total=100, per_epoch=10, history=history[name]) for name in JOBS}
    going = next_round.who_goes_on(at_boundary(beginning(selection=rule), progress))
    assert set(going.jobs) == {"one", "two"}
    assert going.dropped == {"three": "epoch_loss 9 after 1 epoch; those that stay had 0.1 to 0.2 by then"}
    again = at_boundary(beginning(selection=rule), progress, pruned=("two",))
    assert "two" not in next_round.who_goes_on(again).jobs


def test_jobs_that_end_before_the_first_rung_are_told() -> None:
    rule = SuccessiveHalving("epoch_loss", min_epochs=2)
    assert next_round.who_goes_on(beginning(selection=rule)).warnings == ()
    jobs = {
        name: dataclasses.replace(job, hparams=HParams(batches=15))
        for name, job in JOBS.items()
        if name == "two"
    }
    stand = dataclasses.replace(beginning(selection=rule), jobs={**JOBS, **jobs})
    (warning,) = next_round.who_goes_on(stand).warnings
    assert "never looks at 'two': 15 batches are 1.5 epochs of its data" in warning
    unknown = dataclasses.replace(stand, estimates={})
    assert "its data has no length" in next_round.who_goes_on(unknown).warnings[0]


@pytest.mark.slow
def test_jobs_train_to_the_next_rung_and_those_at_it_wait() -> None:
    stand = beginning(selection=SuccessiveHalving("epoch_loss"))
    going = next_round.who_goes_on(stand)
    assert going.rung == 1.0
    assert set(going.situation.left.values()) == {0.1}
    decided, entries = planned(stand)
    assert {entry.most_batches for entry in entries} == {10}
    assert decided.adoption.length == math.inf, "the rung ends the round"
    ahead = Progress(steps=20, total=100, per_epoch=10)
    behind = Progress(steps=10, total=100, per_epoch=10)
    later = at_boundary(stand, {"one": ahead, "two": behind, "three": behind})
    going = next_round.who_goes_on(later)
    assert going.rung == 2.0
    assert going.situation.left == {"two": pytest.approx(0.1), "three": pytest.approx(0.1)}


def test_speeds_that_were_seen_correct_what_is_expected() -> None:
    progress = {"one": Progress(speeds=(Speed("single", 1, "cpu", 3.0), Speed("other", 1, "cpu", 1.0)))}
    speeds = next_round.seen(progress, ESTIMATES, JOBS)
    assert [(s.job, s.technique, s.factor) for s in speeds] == [("one", "single", 3.0)]
    known = next_round.learned(PROBLEM, speeds, JOBS)
    seconds = {j.name: j.options[0].seconds["cpu"] for j in known.jobs}
    assert seconds["one"] == pytest.approx(300.0, rel=0.02)
    assert next_round.learned(PROBLEM, [], JOBS) == PROBLEM


def test_jobs_leave_nodes_that_are_gone_and_wait_where_they_fit_nowhere_else() -> None:
    found = next_round.on_what_is_there(PROBLEM, CLUSTER, {"b": "drained", "c": "of another sweep"})
    assert (found.problem.nodes, found.gone, found.stranded) == ((A,), {"b": "drained"}, ())
    bound = dataclasses.replace(PROBLEM.jobs[0], nodes=("b",))
    problem = dataclasses.replace(PROBLEM, jobs=(bound, *PROBLEM.jobs[1:]))
    found = next_round.on_what_is_there(problem, CLUSTER, {"b": "drained"})
    assert found.stranded == ("one",)
    assert [j.name for j in found.problem.jobs] == ["two", "three"]
    assert not found.waits
    nowhere = next_round.on_what_is_there(problem, CLUSTER, {"a": "lost", "b": "drained"})
    assert nowhere.waits
    assert nowhere.problem == problem
    assert next_round.on_what_is_there(found.problem, CLUSTER, {}).problem.nodes == (A, B)


def test_a_deadline_that_cannot_be_met_says_why() -> None:
    from saturn_airflow.model.deadlines import Deadline

    stand = beginning(rounds=1, objective="device-time", deadline=Deadline(seconds=300.0))
    assert planned(stand, 300.0)[0].missed is None
    assert "planning ends 1 s after it" in str(planned(stand, 0.0)[0].missed)


@pytest.mark.slow
def test_nothing_of_airflow_is_needed() -> None:
    code = (
        "import sys; import saturn_airflow.deciding.next_round;"
        "assert not {'airflow', 'mlflow', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_later_rounds_plan_without_what_training_was_refused(tmp_path: Path) -> None:
    """A job that fell back holds all that its first strategy had: it moves to what the other one needs."""
    wide = [dataclasses.replace(e, technique="ddp", devices=2) for e in ESTIMATES.values()]
    options = (Option("single", 1, {"cpu": 100.0}), Option("ddp", 2, {"cpu": 40.0}))
    problem = Problem("p", (Node("a", 2, "cpu"),), tuple(PlannedJob(name, options) for name in JOBS))
    estimates = by_key(*ESTIMATES.values(), *wide)
    state = dataclasses.replace(beginning(), problem=problem, estimates=estimates)
    state = at_boundary(state, {})
    entries = state.before
    assert {entry.technique for entry in entries.values()} == {"ddp"}
    refusal = RefusedStrategy(technique="ddp", devices=2, reason="it differs")
    one = training(tmp_path, entries["one"], 5, technique="ddp", refusals=(refusal,))
    edited = {"two": dataclasses.replace(entries["two"], own_code="of the code before")}
    progress = {**state.progress, "one": one, "two": Progress(refusals=(refusal,))}
    found = without_refused(dataclasses.replace(state, progress=progress, before={**entries, **edited}))
    left = {job.name: [option.technique for option in job.options] for job in found.problem.jobs}
    assert left == {"one": ["single"], "two": ["single", "ddp"], "three": ["single", "ddp"]}
    decided, later = planned(found)
    assert decided.adoption.moved == ("one",)
    assert {entry.technique for entry in later if entry.name == "one"} == {"single"}
    alone = dataclasses.replace(problem, jobs=(PlannedJob("one", options[1:]),))
    assert without_refused(dataclasses.replace(found, problem=alone)).problem == alone


def refused_to(state: SweepState, *refusals: RefusedStrategy) -> SweepState:
    """``state`` at a boundary, with ``one`` refused these; every job might have ``ddp``, too."""
    wide = [dataclasses.replace(e, technique="ddp", devices=2) for e in ESTIMATES.values()]
    options = (Option("single", 1, {"cpu": 100.0}), Option("ddp", 2, {"cpu": 40.0}))
    same = {name: dataclasses.replace(JOBS["one"], name=name) for name in JOBS}
    problem = Problem("p", (Node("a", 2, "cpu"),), tuple(PlannedJob(name, options) for name in JOBS))
    estimates = by_key(*ESTIMATES.values(), *wide)
    state = at_boundary(dataclasses.replace(state, problem=problem, jobs=same, estimates=estimates), {})
    return dataclasses.replace(state, progress={**state.progress, "one": Progress(refusals=refusals)})


@pytest.mark.parametrize(
    ("status", "of_others"),
    [
        (Status.CHANGES_RESULT, ["single"]),
        (Status.DOES_NOT_FIT, ["single", "ddp"]),
        (Status.OUT_OF_MEMORY, ["single", "ddp"]),
    ],
)
def test_what_is_refused_to_a_job_alone_says_nothing_of_others(status: Status, of_others: list[str]) -> None:
    """As where one of two wants to be exact, or met a batch that memory did not suffice for."""
    refusal = RefusedStrategy(technique="ddp", devices=2, reason="no", status=status)
    found = without_refused(refused_to(beginning(), refusal))
    left = {job.name: [option.technique for option in job.options] for job in found.problem.jobs}
    assert left == {"one": ["single"], "two": of_others, "three": of_others}


def test_a_plan_from_before_a_refusal_is_not_carried_on_though_a_round_between_came_to_nothing() -> None:
    """The round between had left what it knew of the refusal, and no plan."""
    state = refused_to(beginning(), RefusedStrategy(technique="ddp", devices=2, reason="it differs"))
    between = dataclasses.replace(state, problem=without_refused(state).problem)
    found = without_refused(between)
    _, later = planned(found)
    assert {entry.technique for entry in later if entry.name == "one"} == {"single"}
