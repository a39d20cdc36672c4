"""What the author of a DAG says of a stage's tasks reaches all of them, and no others."""

from __future__ import annotations

import os
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import DAG, BaseHook, task_group
from airflow.sdk.exceptions import AirflowNotFoundException
from any_job import ANY_JOB

from saturn_airflow import Cluster, InvalidSweepError, Node, SaturnSweepOperator
from saturn_airflow.operators.context import mlflow_uri
from saturn_airflow.tracking.server import SHOWN_VARIABLE

NODES = Cluster(Node("gpu-a", devices=2), Node("gpu-b", devices=2))
#: What the tasks of each stage are called, in sweeps of one round and of several.
STAGES = {
    "profile_args": ("wave_1.gpu-a", "wave_4.gpu-b"),
    "plan_args": ("trials", "choose_2", "plan", "gpu-a_jobs", "gpu-b_trials", "watch"),
    "train_args": ("train.gpu-a", "train.gpu-b"),
    "report_args": ("report",),
}


def call(context: Any) -> None:
    """A callback."""


def tasks_of(**settings: Any) -> dict[str, Any]:
    with DAG("stages") as dag:
        SaturnSweepOperator(**{"task_id": "sweep", "jobs": [ANY_JOB], "cluster": NODES, **settings})
    return {task.task_id: task for task in dag.tasks}


def is_of(task_id: str, stage: str) -> bool:
    return task_id.endswith(STAGES[stage])


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_a_stages_arguments_reach_all_its_tasks_and_no_others(stage: str, rounds: int) -> None:
    own = {"pool": "mine", "priority_weight": 7, "on_failure_callback": call}
    tasks = tasks_of(rounds=rounds, **{stage: own})
    having = {name for name, task in tasks.items() if task.pool == "mine"}
    assert having == {name for name, task in tasks.items() if task.priority_weight == 7}
    assert having == {name for name, task in tasks.items() if task.has_on_failure_callback}
    for name in STAGES[stage]:
        found = [task for task in tasks if task.endswith(name)]
        assert having.issuperset(found)
        assert found or (name, rounds) == ("watch", 1)
    for other in STAGES.keys() - {stage}:
        assert not [name for name in having if is_of(name, other)]


@pytest.mark.parametrize(("priority", "weight"), [(0.0, 1), (10.0, 10_000), (-0.5, -500), (1e9, 2**31 - 1)])
def test_a_higher_priority_goes_first_where_tasks_wait_for_a_pool(priority: float, weight: int) -> None:
    """They have not asked for devices yet, and Airflow would start those of the older run."""
    tasks = tasks_of(priority=priority)
    found = [task for name, task in tasks.items() if is_of(name, "train_args") or is_of(name, "profile_args")]
    assert found
    assert {task.priority_weight for task in found} == {weight}
    assert {str(task.weight_rule) == "absolute" for task in found} == {priority != 0}
    own = tasks_of(priority=priority, train_args={"priority_weight": 7})
    assert own["sweep.train.gpu-a"].priority_weight == 7


def test_a_sweep_in_a_mapped_group_says_what_to_do() -> None:
    @task_group
    def regions(region: str) -> None:
        SaturnSweepOperator(task_id="sweep", jobs=[ANY_JOB], cluster=NODES)

    with (
        DAG("stages"),
        pytest.raises(InvalidSweepError, match=r"sweep 'sweep': .* a task group that is mapped"),
    ):
        regions.expand(region=["north", "south"])
    with DAG("stages"):
        regions("north")


def test_short_tasks_may_have_a_queue_of_their_own() -> None:
    tasks = tasks_of(plan_args={"queue": "short"})
    assert {tasks[f"sweep.{name}"].queue for name in ("trials", "plan")} == {"short"}
    assert tasks["sweep.train.gpu-a"].queue == "saturn.gpu-a"


def test_the_execution_timeout_of_training_is_a_jobs_time() -> None:
    train = tasks_of(train_args={"execution_timeout": timedelta(hours=2)})["sweep.train.gpu-a"]
    assert train.partial_kwargs["execution_timeout"] == timedelta(hours=2)


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize(
    "name_and_value",
    [
        ("do_xcom_push", False),
        ("depends_on_past", True),
        ("wait_for_downstream", True),
        ("trigger_rule", "all_failed"),
        ("retries", 0),
    ],
    ids=lambda pair: pair[0],
)
def test_what_default_args_say_of_all_tasks_breaks_no_sweep(
    name_and_value: tuple[str, Any], rounds: int
) -> None:
    name, value = name_and_value
    plain = tasks_of(rounds=rounds, register_as="model")
    with DAG("stages", default_args={name: value}) as dag:
        SaturnSweepOperator(
            task_id="sweep", jobs=[ANY_JOB], cluster=NODES, rounds=rounds, register_as="model"
        )
    for task in dag.tasks:
        # Whether the sweep begins is what they may say.
        if task.task_id != "sweep.trials" or name in ("do_xcom_push", "retries"):
            assert _argument(task, name) == _argument(plain[task.task_id], name), task.task_id


def _argument(task: Any, name: str) -> Any:
    """Also of one that is mapped."""
    return getattr(task, "partial_kwargs", {}).get(name, getattr(task, name, None))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train_args": {"pol": "x"}}, r"train_args has 'pol'.*did you mean 'pool'\?"),
        ({"train_args": {"queue": "x"}}, "train_args has 'queue', which is not for it to say"),
        ({"train_args": {"retries": 3}}, "train_args has 'retries', which is not for it to say"),
        ({"report_args": "pool"}, "report_args is 'pool'; give the arguments of its tasks"),
    ],
)
def test_what_a_stage_can_not_take_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSweepError, match=message):
        tasks_of(**arguments)


def test_only_the_default_connection_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(conn_id: str) -> None:
        raise AirflowNotFoundException(conn_id)

    monkeypatch.setattr(BaseHook, "get_connection", missing)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow:5000")
    assert mlflow_uri() == "http://mlflow:5000"
    with pytest.raises(InvalidSweepError, match="mlflow_conn_id is 'team', and Airflow has no such"):
        mlflow_uri("team")


def test_links_are_by_the_address_that_people_open_but_not_those_to_another_mlflow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connection = SimpleNamespace(conn_type="http", host="mlflow", schema=None, port=5000, login=None)
    monkeypatch.setattr(BaseHook, "get_connection", lambda conn_id: connection)
    monkeypatch.setenv("AIRFLOW__SATURN__MLFLOW_URL", "https://mlflow.example.com")
    monkeypatch.setenv(SHOWN_VARIABLE, "")  # put back as it was
    assert (mlflow_uri(), os.environ[SHOWN_VARIABLE]) == ("http://mlflow:5000", "https://mlflow.example.com")
    assert (mlflow_uri("team"), os.environ.get(SHOWN_VARIABLE)) == ("http://mlflow:5000", None)


def test_the_connection_to_mlflow_reaches_all_that_write_there() -> None:
    for rounds in (1, 2):
        tasks = tasks_of(mlflow_conn_id="team", rounds=rounds)
        for name, task in tasks.items():
            if name.endswith(("trials", "plan", "report", "train.gpu-a")) and "profile" not in name:
                given = getattr(task, "partial_kwargs", vars(task))
                assert given["settings"].mlflow_conn_id == "team", name
