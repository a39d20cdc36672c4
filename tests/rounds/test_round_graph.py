"""Sweeps with rounds when their DAG is parsed: the graph, and mistakes."""

from __future__ import annotations

from typing import Any

import pytest
from airflow.sdk import dag

from saturn_airflow import (
    Cluster,
    HParams,
    InvalidSweepError,
    Job,
    MedianStopping,
    Node,
    Rounds,
    SaturnSweepOperator,
    SuccessiveHalving,
)

ONE = Cluster(Node("local", devices=2, kind="cpu"))
TWO = Cluster(Node("gpu-a", devices=8), Node("gpu-b", devices=8))


def build(**arguments: Any) -> Any:
    job = Job(
        "a",
        "torch.nn:Linear",
        "torch.utils.data:DataLoader",
        hparams=HParams(epochs=2),
        model_args={"in_features": 1, "out_features": 1},
        data_args={"dataset": []},
        techniques=["single"],
    )

    @dag(schedule=None)
    def nightly() -> None:
        SaturnSweepOperator(**{"task_id": "sweep", "jobs": [job], "cluster": ONE, **arguments})

    return nightly()


def test_one_round_is_the_graph_of_a_sweep_without_rounds() -> None:
    for cluster in (ONE, TWO):
        usual, one = build(cluster=cluster), build(cluster=cluster, rounds=1)
        assert usual.task_ids == one.task_ids
        for task in usual.tasks:
            assert type(task) is type(one.get_task(task.task_id))
            assert task.downstream_task_ids == one.get_task(task.task_id).downstream_task_ids
        in_reserve = {task for task in one.task_ids if "round" in task}
        stages = ("plan", "train.gpu-a", "train.gpu-a_jobs", "train.gpu-b", "train.gpu-b_jobs")
        assert in_reserve == ({f"sweep.round_2.{s}" for s in stages} if cluster is TWO else set())
        assert ("sweep.watch" in one.task_ids) == (cluster is TWO)


def test_each_round_is_a_plan_and_its_training() -> None:
    found = build(rounds=3)
    ids = [task for task in found.task_ids if "round" in task]
    assert ids == [f"sweep.round_{n}.{stage}" for n in (1, 2, 3) for stage in ("plan", "train")]
    assert "sweep.round_2.plan" in found.get_task("sweep.round_1.train").downstream_task_ids
    assert "sweep.round_2.train" in found.get_task("sweep.round_2.plan").downstream_task_ids
    # A plan runs however the training before it ended.
    assert found.get_task("sweep.round_2.plan").trigger_rule == "all_done"
    assert found.get_task("sweep.report").upstream_task_ids == {
        i for i in ids if i.endswith(("train", "plan"))
    }


def test_each_round_has_a_train_task_per_node() -> None:
    ids = build(cluster=TWO, rounds=Rounds(most=2, every_minutes=30)).task_ids
    assert {"sweep.round_2.train.gpu-a", "sweep.round_2.train.gpu-b", "sweep.round_2.train.gpu-a_jobs"} <= {
        *ids
    }


def test_rounds_watch_their_nodes_where_there_are_several_and_one_more_is_in_reserve() -> None:
    found = build(cluster=TWO, rounds=3)
    watched = [task for task in found.task_ids if task.endswith("watch")]
    assert watched == ["sweep.round_1.watch", "sweep.round_2.watch", "sweep.round_3.watch"]
    assert "sweep.round_4.plan" in found.task_ids
    watch = found.get_task("sweep.round_2.watch")
    assert watch.upstream_task_ids == {"sweep.round_2.plan"}
    assert watch.downstream_task_ids == {"sweep.report"}, "the next round does not wait for it"
    assert watch.train_tasks == {node: f"sweep.round_2.train.{node}" for node in ("gpu-a", "gpu-b")}
    assert not [task for task in build(rounds=3).task_ids if task.endswith("watch")]


def selects_nothing(histories: Any) -> Any:
    return []


def test_rules_and_functions_are_taken() -> None:
    for rule in (SuccessiveHalving("epoch_loss"), MedianStopping("epoch_loss")):
        planned = build(rounds=2, selection=rule).get_task("sweep.round_2.plan")
        assert planned.settings.selection == rule


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"rounds": 0}, "at least 1"),
        ({"rounds": "often"}, "rounds is 'often'"),
        ({"selection": SuccessiveHalving()}, "give rounds=2 or more"),
        ({"rounds": 3, "selection": SuccessiveHalving()}, "no load_eval_dataloader"),
        ({"rounds": 3, "selection": lambda histories: []}, "a lambda"),
        ({"rounds": 3, "selection": 7}, "selection is 7"),
    ],
)
def test_a_mistake_is_told_when_the_dag_is_parsed(arguments: Any, words: Any) -> None:
    with pytest.raises(InvalidSweepError, match=words) as raised:
        build(**arguments)
    assert str(raised.value).startswith("sweep 'sweep': ")
