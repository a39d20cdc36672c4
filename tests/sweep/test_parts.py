"""A mapped task pulls the items around its own, not all there are."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import DAG
from airflow.sdk.exceptions import AirflowFailException
from airflow.serialization.serialized_objects import DagSerialization
from any_job import ANY_JOB

from saturn_airflow import Cluster, Node, SaturnSweepOperator
from saturn_airflow.operators import xcom_parts
from saturn_airflow.operators.context import SweepContext

COUNT = 200
ITEMS = [{"name": f"job-{i}", "job": "x" * 1000} for i in range(COUNT)]


class Instance:
    """A task instance with XComs; counts what is pulled."""

    dag_id, run_id = "dag", "run"

    def __init__(self, xcoms: dict[str, Any], map_index: int = -1) -> None:
        self.xcoms, self.map_index, self.pulled = xcoms, map_index, 0

    def xcom_push(self, key: str, value: Any) -> None:
        self.xcoms[key] = value

    def xcom_pull(self, task_ids: str, key: str, **_: Any) -> Any:
        self.pulled += len(json.dumps(found := self.xcoms.get(key)))
        return found


@pytest.fixture(params=[1, 2])
def tasks(request: pytest.FixtureRequest) -> Any:
    nodes = Cluster(*(Node(f"gpu-{i}", devices=2) for i in range(request.param)))
    with DAG("parts") as dag:
        SaturnSweepOperator(task_id="sweep", jobs=[ANY_JOB], cluster=nodes, rounds=request.param)
    return dag.tasks


def listed(xcoms: dict[str, Any]) -> dict[str, Any]:
    """The XComs of a task that has returned its items."""
    ti = Instance(xcoms)
    xcom_parts.hand_out({"ti": ti}, ITEMS)  # type: ignore[typeddict-item]
    return {**xcoms, "return_value": ITEMS}


def test_each_mapped_task_gets_its_own_item_and_pulls_a_few(tasks: Any) -> None:
    xcoms = listed({})
    whole = len(json.dumps(ITEMS))
    mapped = [task for task in tasks if task.is_mapped]
    assert mapped
    for task in mapped:
        (name,) = task.expand_input.value
        for index in (0, 7, 8, COUNT - 1):
            ti = Instance(xcoms, index)
            found, _ = task.expand_input.resolve({"ti": ti})
            assert found == {name: ITEMS[index]}
            assert ti.pulled <= xcom_parts.SIZE * whole / COUNT * 1.01


def test_what_a_version_without_parts_returned_is_pulled_whole(tasks: Any) -> None:
    for task in tasks:
        if task.is_mapped:
            ti = Instance({"return_value": ITEMS}, 9)
            ti.get_relevant_upstream_map_indexes = lambda **_: None  # type: ignore[attr-defined]
            (found,) = task.expand_input.resolve({"ti": ti})[0].values()
            assert found == ITEMS[9]


def test_every_task_that_is_mapped_over_makes_parts(tasks: Any) -> None:
    by_id = {task.task_id: task for task in tasks}
    for task in tasks:
        if task.is_mapped:
            (source,) = task.expand_input.value.values()
            maker = by_id[source.operator.task_id]
            assert maker._post_execute_hook is xcom_parts.hand_out, maker


def test_in_the_serialised_dag_it_is_the_returned_list(tasks: Any) -> None:
    text = json.dumps(DagSerialization.to_dict(tasks[0].dag))
    dag = DagSerialization.from_dict(json.loads(text))
    for task in dag.task_dict.values():
        if task.is_mapped:
            ((_, source),) = task.expand_input.value.items()  # type: ignore[union-attr]
            assert type(source).__name__ == "SchedulerPlainXComArg"
            assert source.key == "return_value"


def test_a_task_that_returns_nothing_makes_no_parts() -> None:
    ti = Instance({})
    xcom_parts.hand_out({"ti": ti}, [])  # type: ignore[typeddict-item]
    xcom_parts.hand_out({"ti": ti}, None)  # type: ignore[typeddict-item]
    assert ti.xcoms == {}
    assert xcom_parts.pull({"ti": SimpleNamespace(map_index=0, xcom_pull=lambda **_: None)}, "plan") is None  # type: ignore[typeddict-item]


@pytest.mark.parametrize("name", ["mlflow", "init", "trials", "champion"])
def test_no_job_shares_its_folder_with_what_the_sweep_keeps(name: str, tmp_path: Path) -> None:
    sweep = SweepContext("dag", "run", "sweep", tmp_path)
    assert sweep.job_folder(name) != tmp_path / name
    assert sweep.job_folder("gpt2") == tmp_path / "gpt2"


def test_what_airflow_has_removed_and_will_not_run_is_told_by_who_lists_it(tasks: Any) -> None:
    """As where a DAG run is cleared while it runs, and its DAG has changed."""
    looked_at = 0
    for maker in [task for task in tasks if getattr(task, "_post_execute_hook", None) is xcom_parts.hand_out]:
        over = [t for t in tasks if t.is_mapped and maker in t.iter_mapped_dependencies()]
        if not over:
            continue
        ti: Any = Instance({})
        states = {f"{over[0].task_id}_{index}": "removed" for index in (1, COUNT)}
        ti.get_task_states = lambda dag_id, task_ids, run_ids, states=states: {"run": states}
        context: Any = {"ti": ti, "task": maker}
        with pytest.raises(AirflowFailException) as told:
            xcom_parts.hand_out(context, ITEMS)
        assert f"Airflow has removed {over[0].task_id} [1] and will not run" in str(told.value)
        assert "Clear the DAG run once more" in str(told.value)
        xcom_parts.hand_out(context, ITEMS[:1])  # what is removed beyond the list is not needed
        ti.get_task_states = lambda **_: {}
        xcom_parts.hand_out(context, ITEMS)
        looked_at += 1
    assert looked_at > 4
