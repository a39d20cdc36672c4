"""The rounds of a sweep in the DAG: each is a plan and its training; several are in groups of their own."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from airflow.sdk import BaseOperator, TaskGroup, TriggerRule

from saturn_airflow.model.settings import SweepSettings
from saturn_airflow.model.stage_settings import Stages
from saturn_airflow.operators.graph import short, train_tasks
from saturn_airflow.operators.plan_task import PlanOperator
from saturn_airflow.operators.round_watch import RoundWatchOperator


def rounds_of(
    settings: SweepSettings, waves: list[Any], stages: Stages
) -> tuple[list[BaseOperator], list[Any], list[BaseOperator]]:
    """``round_1.plan``, ``round_1.train``, ``round_2.plan`` and so on; of one round ``plan`` and ``train``.

    A plan waits for all training of the round before, however that ended: at a boundary its tasks succeed.
    Where there are several nodes, ``round_1.watch`` notices that one is lost or drained, and one more round
    than is asked for is in reserve for what it had, and skipped where none is.

    :param waves: the tasks that measure, which the first plan waits for.
    :returns: the plan tasks, the train tasks, and the others.
    """
    plans: list[BaseOperator] = []
    trained: list[Any] = []
    watching: list[BaseOperator] = []
    cluster, most = settings.cluster, settings.rounds.most
    before = waves
    for number in range(1, settings.last_round + 1):
        with TaskGroup(group_id=f"round_{number}") if max(most, number) > 1 else nullcontext():
            planned = PlanOperator(
                task_id="plan",
                number=number,
                settings=settings,
                profile_tasks=[task.task_id for task in waves],
                earlier=[task.task_id for task in plans],
                trained=[task.task_id for task in trained],
                **short(stages.plan, TriggerRule.ALL_DONE),
            )
            training = train_tasks(settings, planned, stages)
            planned.train_tasks = [task.task_id for task in training]
            if number < settings.last_round and len(cluster) > 1:
                watch = RoundWatchOperator(
                    task_id="watch",
                    number=number,
                    settings=settings,
                    plan_task=planned.task_id,
                    train_tasks={n.name: t.task_id for n, t in zip(cluster, training, strict=True)},
                    **short(stages.plan),
                )
                planned >> watch
                watching.append(watch)
        before >> planned
        plans.append(planned)
        trained += training
        before = [planned, *training]
    return plans, trained, watching
