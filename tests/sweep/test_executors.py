"""Which executors run sweeps, and what the others are told."""

from __future__ import annotations

import pytest
from airflow.sdk import DAG

from saturn_airflow import Cluster, HParams, Job, Node, SaturnSweepOperator
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.operators.executors import check_executor, of_node_tasks

JOB = Job("only", "small_jobs:linear", "small_jobs:noise", "small_jobs:squared", hparams=HParams(batches=5))
GPUS = [Node("gpu-a", 8), Node("gpu-b", 8)]
SLOTS = [Node("a", 2, kind="cpu"), Node("b", 2, kind="cpu")]
CELERY = "airflow.providers.celery.executors.celery_executor.CeleryExecutor"


def use(executor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__CORE__EXECUTOR", executor)
    monkeypatch.setenv("AIRFLOW__SATURN__CHECK_REFERENCES", "False")


@pytest.mark.parametrize(
    ("executor", "nodes", "words"),
    [
        ("CeleryExecutor", GPUS, None),
        ("LocalExecutor,CeleryExecutor", GPUS, None),
        (f"KubernetesExecutor,queues:{CELERY}", GPUS, None),
        ("LocalExecutor", GPUS[:1], None),
        ("LocalExecutor", SLOTS, None),
        (
            "LocalExecutor",
            GPUS,
            "all tasks on the scheduler's machine, and the sweep has the nodes gpu-a, gpu-b",
        ),
        (
            "KubernetesExecutor",
            GPUS[:1],
            "KubernetesExecutor, which Saturn does not know to run a task on its",
        ),
        (
            "KubernetesExecutor,LocalExecutor",
            GPUS[:1],
            "use the CeleryExecutor|sweeps run with the CeleryExecutor",
        ),
        ("LocalExecutor;team_a=CeleryExecutor", GPUS, "this Airflow has teams"),
    ],
)
def test_an_executor_that_runs_tasks_elsewhere_is_refused(
    executor: str, nodes: list[Node], words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(executor, monkeypatch)
    if words is None:
        check_executor(nodes)
    else:
        with pytest.raises(InvalidSweepError, match=words):
            check_executor(nodes)


def test_cpu_slots_of_several_nodes_on_one_machine_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    use("LocalExecutor", monkeypatch)
    said: list[str] = []
    check_executor(SLOTS, said.append)
    assert said == ["[core] executor is LocalExecutor: the CPU slots of a, b are all on this machine"]


@pytest.mark.parametrize(
    ("executor", "name"),
    [
        ("CeleryExecutor", None),
        ("LocalExecutor", None),
        ("LocalExecutor,CeleryExecutor", "CeleryExecutor"),
        (f"LocalExecutor,queues:{CELERY}", "queues"),
        (f"LocalExecutor,{CELERY}", CELERY),
    ],
)
def test_where_there_are_several_tasks_on_nodes_ask_for_celery(
    executor: str, name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(executor, monkeypatch)
    assert of_node_tasks() == name
    with DAG("several") as dag:
        SaturnSweepOperator(task_id="sweep", jobs=[JOB], cluster=Cluster(*GPUS))
    on_nodes = {task.executor for task in dag.tasks if task.queue.startswith("saturn.")}
    others = {task.executor for task in dag.tasks if not task.queue.startswith("saturn.")}
    assert (on_nodes, others) == ({name}, {None})


def test_a_dag_that_fails_fast_is_told_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    use("CeleryExecutor", monkeypatch)
    with DAG("hasty", fail_fast=True), pytest.raises(InvalidSweepError, match=r"sweep 'sweep': .* fail_fast"):
        SaturnSweepOperator(task_id="sweep", jobs=[JOB], cluster=Cluster(*GPUS))
