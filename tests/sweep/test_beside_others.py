"""A plan that is made while other sweeps are active: what its task reads, and what becomes of that."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from saturn_airflow import Cluster, HParams, Job, Node, Rounds
from saturn_airflow.cli import main
from saturn_airflow.deciding.next_round import DecidedRound, JobsGoingOn, SweepState
from saturn_airflow.launch import whereabouts
from saturn_airflow.launch.ledger import Ledger
from saturn_airflow.model.active_sweep import ActiveSweep
from saturn_airflow.model.deadlines import Deadline
from saturn_airflow.model.entries import PlanEntry
from saturn_airflow.model.estimates import Estimate, Trial
from saturn_airflow.model.folders import slug
from saturn_airflow.model.plan import Assignment, Place, Plan
from saturn_airflow.model.problem import Option, PlannedJob, Problem
from saturn_airflow.model.settings import SweepSettings
from saturn_airflow.model.sharing import SharedJob, SharedSweep
from saturn_airflow.operators import promises
from saturn_airflow.operators.context import SweepContext
from saturn_airflow.operators.deadline_watch import DeadlineWatch, say_what_breaks
from saturn_airflow.operators.making_claims import claim, trial_name
from saturn_airflow.operators.others import (
    among_others,
    around_others,
    others_now,
    tell_of_trials,
)
from saturn_airflow.operators.plan_task import PlanOperator
from saturn_airflow.planning.online.adoption import Adoption
from saturn_airflow.planning.online.execution import Situation
from saturn_airflow.planning.warming import warm
from saturn_airflow.plugin.cluster_page import cluster_page
from saturn_airflow.profiling.fingerprints import fingerprint
from saturn_airflow.profiling.options import by_key

NODE = Node("n", 2, "cpu")
#: Fast on two devices, of which another sweep has one for some 50 s.
OWN = Problem(
    "p", (NODE,), (PlannedJob("a", (Option("one", 1, {"cpu": 20.0}), Option("two", 2, {"cpu": 12.0}))),)
)


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """That of a deployment in which another sweep runs."""
    warm()
    monkeypatch.setenv("AIRFLOW__SATURN__HOME", str(tmp_path))
    long = SharedJob(PlannedJob("long", (Option("one", 1, {"cpu": 100.0}),), ("n",)))
    facts = SharedSweep("other/run/sweep", (long,), arrived=time.time(), alone=100.0)
    found = Ledger(tmp_path)
    found.write(ActiveSweep(dag_id="other", run_id="run", folder="o", made=1.0, nodes=(NODE,), sweep=facts))
    here = whereabouts.Whereabouts(share=0.5, place=Place("one", 1, "n", (0,)), since=time.time() - 50)
    monkeypatch.setattr(whereabouts, "of", lambda folder: here)
    return found


def context(active: int) -> Any:
    return {"ti": SimpleNamespace(get_dr_count=lambda **asked: active)}


@pytest.mark.parametrize("objective", ["makespan", "mean-completion"])
def test_a_plan_is_made_around_what_others_run_and_its_gap_is_to_that(ledger: Ledger, objective: str) -> None:
    settings = SweepSettings(cluster=Cluster(NODE), group="sweep", planning_seconds=5.0, objective=objective)  # type: ignore[arg-type]
    others = others_now(context(1), "own/run/sweep", OWN)
    problem = around_others(OWN, others, ())
    assert problem.free["n"] == (pytest.approx(50, abs=2), 0.0)  # type: ignore[comparison-overlap]
    stand = SweepState(settings=settings, number=1, problem=OWN, jobs={}, estimates={})
    going = JobsGoingOn(("a",), {}, (), math.inf, Situation({"a": 1.0}), ())
    operator = PlanOperator(task_id="plan", settings=settings, profile_tasks=[])
    decided = operator.decide(stand, problem, going)
    facts = SharedSweep("own/run/sweep", (), arrived=others.now, alone=12.0)
    plan = among_others(stand, problem, going.situation, decided, facts, others).adoption.plan
    (assigned,) = plan.assignments
    assert (assigned.technique, assigned.device_ids) == ("one", (1,))
    assert (plan.makespan, plan.gap) == (pytest.approx(20.0), pytest.approx(0.0, abs=1e-6))  # type: ignore[comparison-overlap]


def test_a_later_round_is_planned_among_others_too(ledger: Ledger) -> None:
    """On both devices its job would be done earlier; but it waited for the other one, which goes first."""
    settings = SweepSettings(
        cluster=Cluster(NODE), group="sweep", planning_seconds=1.0, rounds=Rounds(most=4)
    )
    others = others_now(context(1), "own/run/sweep", OWN)
    before = Plan("p", "makespan", 20.0, 0.0, 0.1, (Assignment("a", "one", 1, "n", (1,), 0.0, 20.0),))
    wide = Plan("p", "makespan", 6.0, 0.0, 0.1, (Assignment("a", "two", 2, "n", (0, 1), 0.0, 6.0),))
    situation = Situation({"a": 0.5}, {"a": Place("one", 1, "n", (1,))})
    stand = SweepState(settings=settings, number=2, problem=OWN, jobs={}, estimates={}, plan=before)
    decided = DecidedRound(Adoption(wide, True, 6.0, 10.0, ("a",), 2.4), OWN, None)
    facts = SharedSweep("own/run/sweep", (), arrived=others.now, alone=12.0)
    found = among_others(stand, OWN, situation, decided, facts, others).adoption
    assert (found.adopted, found.moved) == (False, ())
    assert found.plan.makespan == pytest.approx(10.0)
    assert found.length == pytest.approx(0.4 * 10.0)
    nobody = replace(others, sweeps=())
    assert among_others(stand, OWN, situation, decided, facts, nobody) is decided


def test_a_sweep_whose_dag_run_has_ended_is_no_other(ledger: Ledger) -> None:
    others = others_now(context(0), "own/run/sweep", OWN)
    assert others.sweeps == ()
    assert around_others(OWN, others, ()).free == {}
    assert ledger.sweeps() == []


def test_a_sweep_that_is_measured_is_known_and_so_is_where(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = SweepContext("new", "run", "sweep", tmp_path / "sweeps" / "new")
    settings = SweepSettings(cluster=Cluster(NODE), group="sweep", priority=9.0)
    job = Job("j", "m:a", "m:b", "m:c", hparams=HParams(batches=9))
    trial = Trial(job=job, technique="two", devices=2, node="n", covers=("j",), fingerprint="mark")
    tell_of_trials(sweep, settings, [{**trial.to_dict(), "made": 1.0, "position": 0}], settings.cluster)
    others = others_now(context(1), "own/run/sweep", OWN)
    (new,) = (one for one in others.sweeps if one.trials)
    assert (new.name, new.priority) == (sweep.key, 9.0)
    assert [job.job.nodes for job in new.jobs] == [("n",)]
    assert others.planned == ["other/run/sweep"], "it is new to who planned before its plan"
    assert main(["why", "other", "--home", str(tmp_path)]) == 0
    assert "new/run/sweep goes before it: its priority is 9, and 0 here" in capsys.readouterr().out
    assert main(["why", "new", "--home", str(tmp_path)]) == 0
    assert "It is being measured" in capsys.readouterr().out
    page = cluster_page(tmp_path, time.time(), {"new", "other"}, lambda runs: set())
    assert {one["dag_id"]: one["measured"] for one in page["sweeps"]} == {"new": True, "other": False}
    # The trial has run, however it ended, where its task leaves what it writes.
    looked: list[Path] = []

    def hung(folder: Path) -> whereabouts.Whereabouts:
        looked.append(folder)
        return whereabouts.Whereabouts(status="hung")

    monkeypatch.setattr(whereabouts, "of", hung)
    assert not any(one.trials for one in others_now(context(1), "own/run/sweep", OWN).sweeps)
    assert sweep.folder / "trials" / slug(trial_name(trial, "j")) in looked
    tell_of_trials(sweep, settings, [], settings.cluster)
    assert sweep.key in [one.key for one in ledger.sweeps()], "no trials, no news"


TOLD: list[dict[str, Any]] = []


def page(context: Any, deadline: dict[str, Any]) -> None:
    TOLD.append(deadline)


@pytest.fixture
def due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[SweepContext, float]:
    """A sweep whose deadline was kept until an urgent one came, and when it was planned."""
    monkeypatch.setenv("AIRFLOW__SATURN__HOME", str(tmp_path))
    TOLD.clear()
    for name, deadline, priority in (("due", 150.0, 0.0), ("urgent", None, 5.0)):
        jobs = tuple(
            SharedJob(PlannedJob(job, (Option("one", 1, {"cpu": 100.0}),), ("n",))) for job in ("a", "b")
        )
        facts = SharedSweep(
            f"{name}/run/sweep",
            jobs,
            arrived=time.time(),
            alone=100.0,
            priority=priority,
            deadline=None if deadline is None else time.time() + deadline,
        )
        written = ActiveSweep(
            dag_id=name, run_id="run", folder=name, made=time.time(), nodes=(NODE,), sweep=facts
        )
        Ledger(tmp_path).write(written)
    return SweepContext("due", "run", "sweep", tmp_path / "sweeps" / "due"), time.time()


def test_the_plan_of_who_breaks_a_deadline_says_so_without_names(
    due: tuple[SweepContext, float], caplog: pytest.LogCaptureFixture
) -> None:
    sweep, attempt = due
    settings = SweepSettings(cluster=Cluster(NODE), group="sweep")
    urgent = SweepContext("urgent", "run", "sweep", sweep.folder.parent / "urgent")
    found = say_what_breaks(context(1), urgent, settings, attempt, True)
    (broken,) = found["breaks"]
    assert broken["without"] < broken["at"] < broken["expected"]
    assert "THIS SWEEP BREAKS A DEADLINE" in caplog.text
    assert "due/run" not in caplog.text
    assert TOLD == []


def test_whose_deadline_is_broken_is_told_once_by_the_plan_or_by_who_trains(
    due: tuple[SweepContext, float], caplog: pytest.LogCaptureFixture
) -> None:
    sweep, attempt = due
    pushed: dict[str, Any] = {}
    task = {"ti": SimpleNamespace(xcom_push=pushed.__setitem__)}
    function = f"{__name__}:page"
    watches = [DeadlineWatch(task, sweep, attempt, function) for _ in range(2)]  # type: ignore[arg-type]
    sweep.folder.mkdir(parents=True)
    for watch in watches:
        watch._checked_at = -math.inf
        watch.look()
        watch.close()
    (told,) = TOLD
    assert told["planned"]
    assert told["expected"] > told["at"]
    assert pushed["late"]["expected"] == told["expected"]
    assert pushed["late"]["by_others"]
    assert caplog.text.count("THE DEADLINE IS EXPECTED TO BE MISSED") == 1
    settings = SweepSettings(cluster=Cluster(NODE), group="sweep", on_missed_deadline=None)
    assert say_what_breaks(context(1), sweep, settings, attempt, True)["expected_late"] > told["at"]
    assert caplog.text.count("THE DEADLINE IS EXPECTED TO BE MISSED") == 1


def test_a_deadline_that_is_kept_again_is_shown_so(due: tuple[SweepContext, float], tmp_path: Path) -> None:
    sweep, attempt = due
    pushed: dict[str, Any] = {}
    task = {"ti": SimpleNamespace(xcom_push=pushed.__setitem__)}
    sweep.folder.mkdir(parents=True)
    watch = DeadlineWatch(task, sweep, attempt, None)  # type: ignore[arg-type]
    for there in (True, False):
        if not there:
            time.sleep(0.01)
            Ledger(tmp_path).remove("urgent/run/sweep")
        watch._checked_at = -math.inf
        watch.look()
        watch.close()
        assert (pushed["late"]["expected"] is not None) is there


def test_a_look_that_fails_costs_no_training(
    due: tuple[SweepContext, float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sweep, attempt = due

    def full(*args: object) -> None:
        raise OSError("No space left on device")

    sweep.folder.mkdir(parents=True)
    monkeypatch.setattr(Ledger, "sweeps", full)
    watch = DeadlineWatch({}, sweep, attempt, None)
    watch._checked_at = -math.inf
    watch.look()
    watch.close()
    assert "No space left" in caplog.text


class Planner(PlanOperator):
    """Plans two jobs of 100 s whose estimates are known; what it hands on is kept."""

    made: dict[str, Any]

    def _beginning(self, context: Any, sweep: SweepContext) -> SweepState:
        jobs = {name: Job(name, "m:a", "m:b", "m:c", hparams=HParams(batches=100)) for name in "ab"}
        marks = [fingerprint(job) for job in jobs.values()]
        known = [
            Estimate(fingerprint=m, technique="one", devices=1, kind="cpu", seconds_per_batch=1.0, batches=8)
            for m in marks
        ]
        planned = tuple(PlannedJob(name, (Option("one", 1, {"cpu": 100.0}),)) for name in jobs)
        problem = Problem(sweep.key, (NODE,), planned)
        return SweepState(
            settings=self.settings, number=1, problem=problem, jobs=jobs, estimates=by_key(*known)
        )

    def _tell(
        self, context: Any, sweep: Any, stand: Any, plan: Any, cluster: Any, made: Any, *, shown: bool
    ) -> None:
        self.made = self.told(plan, cluster, plan)


@pytest.mark.parametrize("is_late", [True, False])
def test_a_plans_task_hands_on_which_deadlines_are_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    """Its own by an urgent sweep, or that of another by this one, which is urgent."""
    monkeypatch.setenv("AIRFLOW__SATURN__HOME", str(tmp_path))
    monkeypatch.setattr(
        promises.Experience, "of", lambda *asked: promises.Experience(True, None, "nothing is known", 0.0)
    )
    TOLD.clear()
    jobs = tuple(SharedJob(PlannedJob(n, (Option("one", 1, {"cpu": 100.0}),), ("n",))) for n in "cd")
    due = None if is_late else time.time() + 150
    facts = SharedSweep(
        "other/run/sweep", jobs, time.time(), 100.0, priority=5.0 if is_late else 0.0, deadline=due
    )
    Ledger(tmp_path).write(
        ActiveSweep(dag_id="other", run_id="run", folder="o", made=1.0, nodes=(NODE,), sweep=facts)
    )
    settings = SweepSettings(cluster=Cluster(NODE), group="sweep", planning_seconds=1.0, priority=9.0)
    if is_late:
        settings = replace(
            settings,
            priority=0.0,
            objective="device-time",
            deadline=Deadline(seconds=150),
            on_missed_deadline=f"{__name__}:page",
        )
    trials: dict[str, Any] = {"started": time.time(), "refusals": {}}
    ti = SimpleNamespace(
        dag_id="own",
        run_id="run",
        xcom_pull=lambda task_ids, key, map_indexes: trials.get(key),
        xcom_push=lambda key, value: None,
        get_dr_count=lambda **asked: 1,
    )
    planner = Planner(task_id="plan", settings=settings, profile_tasks=[])
    entries = planner.plan({"ti": ti, "dag": SimpleNamespace(timezone=None)})  # type: ignore[typeddict-item]
    assert [entry["name"] for entry in entries] == ["a", "b"]
    assert ("breaks" in planner.made) is not is_late
    assert ("expected_late" in planner.made) is is_late
    assert [told["planned"] for told in TOLD] == [True] * is_late


def test_a_claim_says_what_the_sweep_needs_at_other_nodes(tmp_path: Path) -> None:
    sweep = SweepContext("own", "run", "sweep", tmp_path / "sweeps" / "own")
    settings = SweepSettings(cluster=Cluster(NODE), group="sweep")
    entry = PlanEntry(
        job=Job("j", "m:a", "m:b", "m:c", hparams=HParams(batches=9)),
        technique="one",
        devices=1,
        node="n",
        device_ids=(0,),
        start=0.0,
        end=9.0,
        kind="cpu",
        fingerprint="f",
        attempt=1.0,
        position=0,
        alone=9.0,
        elsewhere=70.0,
    )
    found = claim(entry, settings, sweep, anew=True)
    assert found is not None
    assert found.sweep.elsewhere == 70.0
