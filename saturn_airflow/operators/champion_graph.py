"""The tasks between training and the report that score the champion anew."""

from __future__ import annotations

from typing import Any

from airflow.sdk import TriggerRule

from saturn_airflow.model.settings import SweepSettings
from saturn_airflow.model.stage_settings import Stages
from saturn_airflow.operators.champion_task import ChampionOperator, ScoreOperator
from saturn_airflow.operators.graph import per_node, short


def champion_scored(
    settings: SweepSettings, plan_tasks: list[str], train: list[Any], stages: Stages
) -> list[Any]:
    """``champion`` and ``score``: one mapped task per node, of which the best job's node has one instance.

    :param train: the tasks that train.
    :returns: ``champion``, then the tasks that score; none where nothing is to be registered.
    """
    if settings.register_as is None:
        return []
    champion = ChampionOperator(
        task_id="champion",
        settings=settings,
        plan_tasks=plan_tasks,
        train_tasks=[task.task_id for task in train],
        **short(stages.report, TriggerRule.ALL_DONE),
    )
    train >> champion
    scoring = per_node(
        settings.cluster,
        champion,
        ScoreOperator,
        "score",
        mapped="entry",
        part="champion",
        label="{{ task.entry.name }} version {{ task.entry.version }}",
        deciding=stages.report,
        settings=settings,
        **short(stages.profile),
    )
    return [champion, *scoring]
