"""What sweeps plan for other than the makespan, at the start and at a boundary."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from saturn_airflow.deciding.next_round import DecidedRound, JobsGoingOn, SweepState
from saturn_airflow.model.cluster import Cluster, Node
from saturn_airflow.model.deadlines import Deadline
from saturn_airflow.model.outcomes import Outcome, TimeOnDevices
from saturn_airflow.model.plan import Place, Plan
from saturn_airflow.model.problem import Option, PlannedJob, Problem
from saturn_airflow.model.settings import SweepSettings
from saturn_airflow.model.status import Status
from saturn_airflow.operators.plan_task import PlanOperator
from saturn_airflow.operators.report_table import table
from saturn_airflow.operators.report_task import lateness
from saturn_airflow.planning.online.adoption import Effort, decide
from saturn_airflow.planning.online.error_law import ErrorLaw, Parts
from saturn_airflow.planning.online.execution import Situation
from saturn_airflow.planning.presenting.explaining import explain
from saturn_airflow.planning.warming import warm

pytestmark = pytest.mark.slow

NODE = Node("n", 2, "cpu")


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """The search is compiled on a machine's first plan, which may take all of a plan's time."""
    warm()


def job(name: str, **seconds: float) -> PlannedJob:
    devices = {"one": 1, "two": 2}
    return PlannedJob(name, tuple(Option(t, devices[t], {"cpu": s}) for t, s in seconds.items()))


#: Thrifty on one device, fast on two.
ONE_JOB = Problem("p", (NODE,), (job("a", one=10.0, two=6.0),))


def operator(**arguments: Any) -> PlanOperator:
    usual = {"cluster": Cluster(NODE), "group": "sweep", "planning_seconds": 15.0}
    return PlanOperator(task_id="plan", settings=SweepSettings(**{**usual, **arguments}), profile_tasks=[])


def planned(operator: PlanOperator) -> Plan:
    """The plan of the only round."""
    return decided_by(operator).adoption.plan


def decided_by(operator: PlanOperator, law: ErrorLaw | None = None, asks_in: float = 0.0) -> DecidedRound:
    stand = SweepState(
        settings=operator.settings,
        number=1,
        problem=ONE_JOB,
        jobs={},
        estimates={},
        law=law,
        asks_in=asks_in,
    )
    going = JobsGoingOn(("a",), {}, (), math.inf, Situation({"a": 1.0}), ())
    return operator.decide(stand, ONE_JOB, going)


@pytest.mark.parametrize(("left", "technique"), [(90.0, "one"), (23.0, "two")])
def test_with_a_deadline_the_thriftiest_plan_that_meets_it_is_made(left: float, technique: str) -> None:
    plans = operator(objective="device-time", deadline=Deadline(seconds=60.0))
    plans.ends_by = time.time() + left
    plan = planned(plans)
    assert [a.technique for a in plan.assignments] == [technique]
    assert plan.value == {"one": 10, "two": 12}[technique]
    assert plans.meets_deadline


@pytest.mark.parametrize(("objective", "technique"), [("device-time", "two"), ("mean-completion", "two")])
def test_a_plan_counts_what_passes_until_its_jobs_ask_for_devices(objective: str, technique: str) -> None:
    """By the deadline in 14 s its job can't be done on one device, which takes 10 s from then."""
    plans = operator(
        objective=objective, deadline=Deadline(seconds=60.0) if objective == "device-time" else None
    )
    plans.ends_by = time.time() + 15.0 + 14.0 if objective == "device-time" else None
    decided = decided_by(plans, ErrorLaw((Parts(0.0, 0.0, 0.0, 0.0),)), asks_in=5.0)
    plan = decided.adoption.plan
    assert [(a.technique, a.start, a.end) for a in plan.assignments] == [(technique, 5.0, 11.0)]
    assert plan.makespan == 11.0
    assert plan.gap == pytest.approx(0.0, abs=1e-6)
    assert plan.value == (12.0 if objective == "device-time" else 11.0)
    assert decided.ends is not None
    assert decided.ends.sweep.median == decided.ends.jobs["a"].median == 11.0
    (reason,) = explain(decided.left, plan).reasons
    assert [other.makespan for other in reason.alternatives] == [15.0]


@pytest.mark.parametrize(
    ("confidence", "factor", "technique", "objective"),
    [
        (0.5, 1.0, "one", "device-time"),  # sure enough with the thrifty one
        (0.9, 1.5, "two", "device-time"),  # the thrifty one would end too late too often
        (0.9, None, "two", "makespan"),  # nothing is known: as early as can be
    ],
)
def test_with_odds_the_thriftiest_plan_that_keeps_them_is_made(
    confidence: float, factor: float | None, technique: str, objective: str
) -> None:
    plans = operator(objective="device-time", deadline=Deadline(seconds=60.0), confidence=confidence)
    plans.ends_by = time.time() + 15.0 + 14.0
    law = None if factor is None else ErrorLaw((Parts(math.log(factor), 0.0, 0.0, 0.0),))
    decided = decided_by(plans, law)
    plan = decided.adoption.plan
    assert ([a.technique for a in plan.assignments], plan.objective) == ([technique], objective)
    assert plans.meets_deadline
    if law is not None:
        assert decided.ends is not None
        assert decided.ends.sweep.by(confidence) <= 14.0


def test_where_no_plan_has_the_odds_all_ends_as_early_as_can_be_and_that_is_said() -> None:
    plans = operator(objective="device-time", deadline=Deadline(seconds=60.0), confidence=0.9)
    plans.ends_by = time.time() + 15.0 + 14.0
    decided = decided_by(plans, ErrorLaw((Parts(0.0, 0.0, 0.0, 0.0), Parts(1.0, 0.0, 0.0, 0.0))))
    assert decided.adoption.plan.makespan == 6.0
    assert not plans.meets_deadline
    assert decided.missed is not None
    assert "it is met with odds of" in decided.missed


@pytest.mark.parametrize("left", [18.0, -100.0])
def test_where_the_deadline_cannot_be_met_all_ends_as_early_as_can_be(left: float) -> None:
    plans = operator(objective="device-time", deadline=Deadline(seconds=60.0))
    plans.ends_by = time.time() + left
    plan = planned(plans)
    assert (plan.objective, plan.makespan) == ("makespan", 6.0)
    told = plans.told(plan, Cluster(NODE), plan)
    assert told["deadline"] == {"at": plans.ends_by, "planned": False}


def test_at_a_boundary_a_deadline_lets_a_job_move_to_where_it_ends_in_time() -> None:
    now = Situation({"a": 0.9}, {"a": Place("one", 1, "n", (0,))})
    before = decide(ONE_JOB, None, Situation({"a": 1.0}), effort=Effort(time_limit=0.2), checkpoint=0.0).plan

    def technique(deadline: float) -> str:
        effort = Effort(time_limit=0.2, objective="device-time", deadline=deadline)
        (found,) = decide(ONE_JOB, before, now, effort=effort, checkpoint=0.5).plan.assignments
        return found.technique

    assert technique(30.0) == "one"
    assert technique(7.0) == "two"
    # In time on paper, but not with the checkpoint: the one that is least late.
    assert technique(5.6) == "two"


def test_the_mean_completion_has_short_jobs_first() -> None:
    node = Node("n", 1, "cpu")
    problem = Problem("p", (node,), (job("long", one=10.0), job("short", one=1.0)))
    effort = Effort(time_limit=0.2, objective="mean-completion")
    found = decide(problem, None, Situation({"long": 1.0, "short": 1.0}), effort=effort, checkpoint=0.0)
    assert [a.job for a in sorted(found.plan.assignments, key=lambda a: a.start)] == ["short", "long"]
    assert found.plan.value == pytest.approx((1 + 11) / 2)


def test_the_report_says_whether_the_deadline_was_met() -> None:
    held = [TimeOnDevices(started_at=0.0, ended_at=end, actual_seconds=end) for end in (90.0, 130.0)]
    outcomes = [Outcome(job="a", status=Status.FINISHED, held=h) for h in (*held, None)]
    assert lateness({"at": 150.0, "planned": True}, outcomes)["met"]
    late = lateness({"at": 100.0, "planned": False}, outcomes)
    assert (late["met"], late["late_seconds"]) == (False, 30.0)
    text = table({"best": None, "deadline": late}, outcomes)
    assert "THE DEADLINE WAS MISSED by 30 s, as the plan had foreseen" in text
