"""What the best job is measured by before it is registered: the champion's score of this sweep, or none."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from saturn_airflow import Cluster, Job, Node, Secret
from saturn_airflow.model.outcomes import Outcome
from saturn_airflow.model.settings import SweepSettings
from saturn_airflow.operators import champion_task
from saturn_airflow.operators.champion_task import ChampionOperator, scored
from saturn_airflow.operators.report_task import ReportOperator
from saturn_airflow.tracking import champion

TASKS = ["sweep.champion", "sweep.score.a", "sweep.score.b"]
SETTINGS = SweepSettings(
    cluster=Cluster(Node("a", 1, kind="cpu")), group="sweep", register_as="digits@champion"
)
PLANNED = {"technique": "single", "devices": 1, "planned_seconds": 1.0, "kind": "cpu", "node": "a"}


def context(**pushed: Any) -> Any:
    """A task's context, with what other tasks have pushed by key."""

    def pull(task_ids: Any = None, key: str = "", map_indexes: Any = None) -> Any:
        return pushed.get(key)

    return {"ti": SimpleNamespace(xcom_pull=pull, dag_id="d", run_id="r", xcom_push=pushed.__setitem__)}


def score(value: float, attempt: float | None) -> dict[str, Any]:
    return {"version": "1", "value": value, "why": None, "attempt": attempt}


def test_a_score_of_an_earlier_attempt_does_not_count() -> None:
    """Airflow keeps what a mapped instance pushed that is no longer there, for another best job."""
    told: dict[str, Any] = {"champion": {"version": "1", "why": None, "attempt": 2.0}, "return_value": []}
    stale, fresh = score(0.9, 1.0), score(0.2, 2.0)
    for scores in ([fresh, stale], [stale, fresh]):
        found = scored(context(**told, score=scores), TASKS)
        assert found == {"version": "1", "value": 0.2, "why": None}
    lost = scored(context(**told, score=[stale]), TASKS)
    assert lost == {"version": "1", "value": None, "why": "its task left no score; see its log"}


def test_what_the_version_before_pushed_counts() -> None:
    before = {"version": "1", "value": 0.2, "why": None}
    told = context(champion={"version": "1", "why": None}, return_value=[], score=[before])
    assert scored(told, TASKS) == before


def test_a_champion_that_could_not_be_fetched_is_not_beaten_by_values_of_other_days() -> None:
    assert scored(context(return_value=[]), TASKS) is None, "it need not be scored"
    failed = scored(context(), TASKS)
    assert failed is not None
    assert (failed["value"], failed["why"]) == (None, "the task that fetches it failed; see its log")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"of_tomorrow": 1}, "its job can't be read here.*of_tomorrow"),
        (
            {"model_args": {"token": Secret("prod_db", "password")}},
            "takes the password of connection 'prod_db', which 'a' does not",
        ),
        (
            {"load_model": "joblib:load"},
            "its load_model 'joblib:load' comes from MLflow, and 'joblib:load' nei",
        ),
        ({"load_model": "os:system"}, "its load_model 'os:system': 'os' is of Python's standard library"),
    ],
    ids=["of a newer version", "that asks for a connection", "of a library", "of the standard library"],
)
def test_some_champions_stay_as_they_are(
    changed: dict[str, Any], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job("a", "shop:model", "shop:data", load_eval_dataloader="shop:data")
    newer = {**job.to_dict(), **changed}
    monkeypatch.setenv("AIRFLOW__SATURN__HOME", str(tmp_path))
    monkeypatch.setattr(champion_task, "mlflow_uri", lambda conn_id: "unused")
    monkeypatch.setattr(
        champion, "fetch", lambda *_: {"version": "7", "run_id": "r", "job": newer, "weights": "w"}
    )
    outcome = Outcome.from_dict(
        {"job": "a", "status": "finished", "attempt": 1.0, **PLANNED, "eval_loss": 0.1}
    )
    pushed: dict[str, Any] = {
        "jobs": [json.loads(json.dumps(job.to_dict()))],
        "attempt": 1.0,
        "outcome": [outcome.to_dict()],
    }
    operator = ChampionOperator(
        task_id="champion", settings=SETTINGS, plan_tasks=["sweep.plan"], train_tasks=["sweep.train"]
    )
    told = context(**pushed)
    told["ti"].xcom_push = pushed.__setitem__
    assert operator.execute(told) == []
    assert pushed["champion"]["version"] == "7"
    assert re.search(why, pushed["champion"]["why"])


def test_what_is_registered_is_of_the_jobs_last_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__SATURN__HOME", str(tmp_path))
    report = ReportOperator(task_id="report", settings=SETTINGS, plan_tasks=["p"], train_tasks=["t"])
    asked: list[Any] = []

    class Run:
        def register(self, *given: Any) -> dict[str, Any]:
            asked.append(given)
            return {}

    job = {"status": "finished", **PLANNED, "eval_loss": 0.1, "model": "folder"}
    outcomes = [Outcome.from_dict({**job, "job": name, "training": n}) for name, n in (("a", 1), ("b", 3))]
    run: Any = Run()
    report.register({}, run, {"job": "b", "metric": "eval_loss", "value": 0.1}, outcomes, None)
    assert asked[0][-1] == 3


def test_the_result_says_what_came_of_registering_where_no_job_is_the_best() -> None:
    report = ReportOperator(task_id="report", settings=SETTINGS, plan_tasks=["p"], train_tasks=["t"])
    run: Any = None
    nothing = {"name": "digits", "alias": "champion", "version": None, "champion": None}
    lost = [Outcome.from_dict({"job": "a", "status": "lost"})]
    assert report.register({}, run, None, lost, None) == {**nothing, "reason": "no job has finished"}
    finished = [Outcome.from_dict({"job": "a", "status": "finished", **PLANNED})]
    assert "no job has told a loss" in report.register({}, run, None, finished, None)["reason"]
    best = {"job": "a", "metric": "eval_loss", "value": 0.1}
    assert "a left no model" in report.register({}, run, best, finished, None)["reason"]
