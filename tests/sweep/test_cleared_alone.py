"""A task that is cleared alone, without what is downstream of it, while a sweep goes on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import DAG
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException
from any_job import ANY_JOB

from saturn_airflow import Cluster, Node, SaturnSweepOperator
from saturn_airflow.model.formats import NewerFormatError
from saturn_airflow.model.settings import SweepSettings
from saturn_airflow.operators import kept_plan
from saturn_airflow.operators.context import SweepContext, pull_from_trials
from saturn_airflow.operators.kept_plan import KeptPlanOperator
from saturn_airflow.operators.retrying import TryAgainError
from saturn_airflow.operators.round_watch import RoundWatchOperator

SETTINGS = SweepSettings(cluster=Cluster(Node("gpu-a", 2, "cpu")), group="sweep", planning_seconds=1.0)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AIRFLOW__SATURN__HOME", str(tmp_path))
    return tmp_path


class Planner(KeptPlanOperator):
    """Each plan it makes is another."""

    made = 0

    def plan(self, context: Any) -> list[dict[str, Any]]:
        Planner.made += 1
        self.hand_on(context, "attempt", float(self.made))
        return [{"name": f"job of plan {self.made}"}]


def tried(states: dict[str, str | None]) -> tuple[list[Any], dict[str, Any]]:
    """What a try of the plan's task returns and pushes; its XComs of before are gone, as Airflow has it."""
    pushed: dict[str, Any] = {}
    ti = SimpleNamespace(
        dag_id="dag",
        run_id="run",
        xcom_push=pushed.__setitem__,
        get_task_states=lambda **_: {"run": states},
    )
    operator = Planner(task_id="plan", settings=SETTINGS)
    operator.train_tasks = ["sweep.train"]
    return operator.execute({"ti": ti}), pushed  # type: ignore[typeddict-item]


def test_the_copy_that_planned_sends_its_records_once_airflow_knows_and_callbacks_of_the_dag_stay() -> None:
    told: list[str] = []
    with DAG("dag", default_args={"on_success_callback": lambda context: told.append("theirs")}):
        planner = Planner(task_id="plan", settings=SETTINGS)
    ran = planner.prepare_for_execution()
    ran.send_records = lambda: told.append("sent")
    for callback in ran.on_success_callback:
        callback({"task": ran})
    assert told == ["sent", "theirs"]


def test_a_plan_that_was_cleared_alone_is_handed_on_again_as_it_was() -> None:
    first = tried({})
    assert tried({"sweep.train_0": "running", "sweep.train_1": None}) == first
    assert tried({"sweep.train_0": "success", "sweep.train_1": "failed"}) == first
    assert tried({"sweep.train.gpu-a_jobs": "success", "sweep.train_0": "up_for_retry"}) == first
    cleared = {"sweep.train_0": "restarting", "sweep.train_1": "up_for_retry", "sweep.train_2": None}
    other = tried({**cleared, "sweep.train.gpu-a_jobs": None, "sweep.train_3": "removed"})
    assert other != first, "with what is downstream, it is planned anew"
    assert tried({"sweep.train_0": "success"}) == other


def test_a_kept_plan_that_is_damaged_is_made_anew_and_a_newer_one_refused(home: Path) -> None:
    first = tried({})
    (file,) = home.glob("sweeps/dag/run/sweep/*.plan")
    file.write_text(file.read_text().replace('"format": 1', '"format": 99'))
    with pytest.raises(NewerFormatError, match="a kept plan in format 99"):
        tried({"sweep.train_0": "success"})
    for damaged in ("", "[]", '{"handed_on": {}}', "nonsense"):
        file.write_text(damaged)
        assert tried({"sweep.train_0": "success"}) != first


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("rounds", [1, 2])
def test_the_report_waits_for_a_plan_that_is_handed_on_again(nodes: int, rounds: int) -> None:
    cluster = Cluster(*(Node(f"gpu-{number}", 2) for number in range(nodes)))
    with DAG("cleared") as dag:
        SaturnSweepOperator(task_id="sweep", jobs=[ANY_JOB], cluster=cluster, rounds=rounds)
    plans = {name for name in dag.task_ids if name.rpartition(".")[2] == "plan"}
    assert len(plans) == (rounds if nodes == 1 else rounds + 1)
    assert plans <= dag.get_task("sweep.report").upstream_task_ids
    for name in plans:
        plan = dag.get_task(name)
        assert plan.train_tasks == [f"{name.removesuffix('plan')}train" + s for s in train_suffixes(nodes)]  # type: ignore[union-attr]


def train_suffixes(nodes: int) -> list[str]:
    return [""] if nodes == 1 else [f".gpu-{number}" for number in range(nodes)]


def trials(state: dict[str, str | None]) -> Any:
    ti = SimpleNamespace(
        dag_id="dag",
        run_id="run",
        xcom_pull=lambda **_: None,
        get_task_states=lambda **_: {"run": state},
    )
    return {"ti": ti}


def test_trials_that_were_cleared_alone_count_on_what_was_measured(home: Path) -> None:
    with DAG("dag") as dag:
        SaturnSweepOperator(task_id="sweep", jobs=[ANY_JOB], cluster=SETTINGS.cluster)
    operator: Any = dag.get_task("sweep.trials")

    def attempt(**states: str | None) -> float:
        context = trials({f"sweep.profile.{name}": state for name, state in states.items()})
        return float(operator.attempt_now(context, SweepContext.of(context, "sweep")))

    first = attempt()
    assert attempt(wave_1_0="success", wave_1_1=None) == attempt(wave_1_0="running") == first
    anew = attempt(wave_1_0="restarting", wave_1_1=None)
    assert anew > first, "what was measured by the list of before does not count"
    (note,) = home.glob("sweeps/dag/run/sweep/trials.listed")
    note.write_text("nonsense")
    assert attempt(wave_1_0="running") > anew


@pytest.mark.parametrize("state", [None, "scheduled", "queued", "running", "up_for_retry"])
def test_while_trials_that_were_cleared_alone_run_the_others_are_tried_again(state: str | None) -> None:
    with pytest.raises(TryAgainError, match=r"sweep\.trials was cleared, and runs again"):
        pull_from_trials(trials({"sweep.trials": state}), "sweep.trials", "sweep")


def test_trials_that_failed_were_skipped_or_are_not_there_are_not_waited_for() -> None:
    for known in ({"sweep.trials": "failed"}, {}):
        with pytest.raises(AirflowFailException, match="its log says why"):
            pull_from_trials(trials(known), "sweep.trials", "sweep")  # type: ignore[arg-type]
    with pytest.raises(AirflowSkipException):
        pull_from_trials(trials({"sweep.trials": "skipped"}), "sweep.trials", "sweep")


def test_what_trials_handed_on_may_be_deleted_or_there_just_now() -> None:
    context = trials({"sweep.trials": "success"})
    with pytest.raises(
        AirflowFailException, match=r"\(jobs\) is gone: .*`airflow db clean`. Clear the whole DAG run"
    ):
        pull_from_trials(context, "sweep.trials", "jobs")
    answers = iter([None, ["job"]])
    context["ti"].xcom_pull = lambda **_: next(answers)
    assert pull_from_trials(context, "sweep.trials", "jobs") == ["job"]


@pytest.mark.parametrize("handed_on", [{}, {"attempt": 100.0}])
@pytest.mark.parametrize(("state", "ended"), [("running", False), (None, False), ("failed", True)])
def test_the_watch_waits_for_a_plan_that_is_handed_on_again_and_not_for_one_that_failed(
    state: str | None, ended: bool, handed_on: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its XComs come one after another, and the list of its jobs last."""
    monkeypatch.setenv("AIRFLOW__CORE__EXECUTOR", "CeleryExecutor")
    watch = RoundWatchOperator(
        task_id="watch",
        number=1,
        settings=SETTINGS,
        plan_task="sweep.plan",
        train_tasks={"gpu-a": "sweep.train"},
    )
    context = trials({"sweep.plan": state})
    context["ti"].xcom_pull = lambda task_ids, key, map_indexes: handed_on.get(key)
    assert watch.poke(context) is ended


def test_a_full_disk_keeps_no_plan_from_being_carried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept_plan, "write_whole", full)
    assert tried({})[0][0]["name"].startswith("job of plan")
