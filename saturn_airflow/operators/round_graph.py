"""The rounds of a sweep in the DAG: each is a plan and its training, in a task group of its own."""

from __future__ import annotations

from typing import Any

from airflow.sdk import BaseOperator, TaskGroup, TriggerRule

from saturn_airflow.model.cluster import Cluster
from saturn_airflow.model.rounds import Rounds
from saturn_airflow.model.selection import Rule
from saturn_airflow.model.stages import Stages
from saturn_airflow.operators.graph import patience, per_node, short
from saturn_airflow.operators.round_plan import RoundPlanOperator
from saturn_airflow.operators.round_train import RoundTrainOperator
from saturn_airflow.operators.round_watch import RoundWatchOperator


def rounds_of(
    cluster: Cluster,
    measured: list[Any],
    rounds: Rounds,
    selection: Rule | None,
    *,
    plan: dict[str, Any],
    train: dict[str, Any],
    job_retries: int,
    stages: Stages,
) -> tuple[list[BaseOperator], list[Any], list[BaseOperator]]:
    """``round_1.plan``, ``round_1.train``, ``round_2.plan`` and so on.

    A plan waits for all training of the round before, however that ended: at a boundary its tasks succeed.
    Where there are several nodes, ``round_1.watch`` notices that one is lost; in the last round nothing could
    be made of that.

    :param measured: what the first plan waits for.
    :param plan: further arguments of the plan tasks.
    :param train: further arguments of the train tasks.
    :returns: the plan tasks, the train tasks, and the others.
    """
    plans: list[BaseOperator] = []
    trained: list[Any] = []
    watching: list[BaseOperator] = []
    before = measured
    for number in range(1, rounds.most + 1):
        with TaskGroup(group_id=f"round_{number}"):
            planned = RoundPlanOperator(
                task_id="plan",
                number=number,
                rounds=rounds.to_dict(),
                selection=None if selection is None else selection.to_dict(),
                earlier=[task.task_id for task in plans],
                trained=[task.task_id for task in trained],
                trigger_rule=TriggerRule.ALL_DONE,
                **plan,
                **short(stages.plan),
            )
            training = per_node(
                cluster,
                planned,
                RoundTrainOperator,
                "train",
                mapped="entry",
                part="jobs",
                label="{{ task.entry.name }}",
                deciding=stages.plan,
                rounds=rounds.to_dict(),
                job_retries=job_retries,
                **train,
                **patience(job_retries),
                **stages.train,
            )
            if len(cluster) > 1 and number < rounds.most:
                watch = RoundWatchOperator(
                    task_id="watch",
                    number=number,
                    cluster=cluster.to_dict(),
                    plan_task=planned.task_id,
                    train_tasks={n.name: t.task_id for n, t in zip(cluster, training, strict=True)},
                    group=train["group"],
                    **short(stages.plan),
                )
                planned >> watch
                watching.append(watch)
        before >> planned
        plans.append(planned)
        trained += training
        before = [planned, *training]
    return plans, trained, watching
