"""Pieces of a sweep's graph: stages of mapped tasks, and rounds, several of them in groups of their own."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from airflow.sdk import BaseOperator, TaskGroup, TriggerRule, XComArg

from saturn_airflow.model.cluster import Cluster, Node
from saturn_airflow.model.settings import SweepSettings
from saturn_airflow.model.stage_settings import Stages
from saturn_airflow.operators.airflow_internals import own_item_of
from saturn_airflow.operators.champion_task import ChampionOperator, ScoreOperator
from saturn_airflow.operators.executors import of_node_tasks
from saturn_airflow.operators.inventory import pool_of, pool_of_short_tasks
from saturn_airflow.operators.plan_task import PlanOperator
from saturn_airflow.operators.profile_task import ProfileOperator
from saturn_airflow.operators.retrying import SHORT_TASK_POLICY, short_task_retries, training_retries
from saturn_airflow.operators.round_train import RoundTrainOperator
from saturn_airflow.operators.round_watch import RoundWatchOperator
from saturn_airflow.operators.trials_task import PickOperator
from saturn_airflow.operators.wave_tasks import NextWaveOperator
from saturn_airflow.profiling.waves import WAVES

#: The pool of tasks that name none.
DEFAULT_POOL = "default_pool"
#: The weight of tasks that name none; of those of a sweep of priority 1, and the highest that Airflow keeps.
USUAL_WEIGHT, _WEIGHT_OF_ONE, _MOST_WEIGHT = 1, 1000, 2**31 - 1

#: What ``default_args`` of a DAG can't change of a sweep's tasks behind the first: they hand lists and
#: outcomes on, and what one of them trains has nothing to do with what it trained in the run before.
_WITHIN = {"do_xcom_push": True, "depends_on_past": False, "wait_for_downstream": False}


def first(own: Mapping[str, Any]) -> dict[str, Any]:
    """Airflow's arguments of the sweep's first task.

    When that begins (``depends_on_past`` and the like) is left to the ``default_args`` of the DAG.

    :param own: what the author of the DAG says of it, which counts before all else.
    """
    return {"retry_policy": SHORT_TASK_POLICY, **short_task_retries(), "do_xcom_push": True, **own}


def short(own: Mapping[str, Any], rule: TriggerRule = TriggerRule.ALL_SUCCESS) -> dict[str, Any]:
    """Airflow's arguments of any other task that needs no device, or measures.

    :param own: what the author of the DAG says of it.
    :param rule: after what it runs.
    """
    return {**first(own), **_WITHIN, "trigger_rule": rule}


def wait_in_pool(group: TaskGroup) -> None:
    """Let the tasks of a sweep that need no device wait in the pool of such tasks, where it was made."""
    pool = pool_of_short_tasks()
    for task in group.iter_tasks():
        if isinstance(task, BaseOperator) and pool is not None and task.pool == DEFAULT_POOL:
            task.pool = pool


def profile_waves(settings: SweepSettings, trials: BaseOperator, stages: Stages) -> list[Any]:
    """The waves of trials: the tasks that measure, each wave's after those of the one before."""
    source = trials
    measuring: list[Any] = []
    with TaskGroup(group_id="profile"):
        for number in range(1, WAVES + 1):
            if number > 1:
                chosen = NextWaveOperator(
                    task_id=f"choose_{number}",
                    settings=settings,
                    profile_tasks=[task.task_id for task in measuring],
                    last=number == WAVES,
                    # Behind a wave that was not needed, none is.
                    **short(stages.plan, TriggerRule.ALL_DONE_MIN_ONE_SUCCESS),
                )
                measuring[-len(settings.cluster) :] >> chosen
                source = chosen
            measuring += per_node(
                settings.cluster,
                source,
                ProfileOperator,
                f"wave_{number}",
                mapped="trial",
                part="trials",
                label="{{ task.trial.job.name }} {{ task.trial.technique }} x {{ task.trial.devices }}",
                deciding=stages.plan,
                settings=settings,
                **short(stages.profile),
            )
    return measuring


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


def train_tasks(settings: SweepSettings, plan: BaseOperator, stages: Stages) -> list[Any]:
    """The tasks that train what ``plan`` returns, one for each node."""
    return per_node(
        settings.cluster,
        plan,
        RoundTrainOperator,
        "train",
        mapped="entry",
        part="jobs",
        label="{{ task.entry.name }}",
        deciding=stages.plan,
        settings=settings,
        trigger_rule=TriggerRule.ALL_SUCCESS,
        **training_retries(settings.retries),
        **_WITHIN,
        **stages.train,
    )


def per_node(
    cluster: Cluster,
    source: BaseOperator,
    operator: type[BaseOperator],
    stage: str,
    *,
    mapped: str,
    part: str,
    label: str,
    deciding: Mapping[str, Any],
    **arguments: Any,
) -> list[Any]:
    """One mapped task per node over that node's part of what ``source`` returns.

    Neither the queue nor the number of active tasks can be mapped, hence a task per node.

    :param stage: the name of the group; on a single node that of the task.
    :param mapped: the operator's argument that gets one item of the list.
    :param part: what the items are called in the ids of the tasks that hand out the nodes' parts.
    :param label: template of the instances' names in the UI.
    :param deciding: what the author of the DAG says of the tasks that hand out the parts.
    :param arguments: of ``operator``, besides.
    """
    if len(cluster) == 1:
        return [_mapped(operator, stage, source, cluster.nodes[0], mapped, label, arguments)]
    tasks = []
    with TaskGroup(group_id=stage):
        for node in cluster:
            pick = PickOperator(
                task_id=f"{node.name}_{part}",
                items=XComArg(source),
                node=node.name,
                **short(deciding),
            )
            tasks.append(_mapped(operator, node.name, pick, node, mapped, label, arguments))
    return tasks


def _mapped(
    operator: type[BaseOperator],
    task_id: str,
    source: BaseOperator,
    node: Node,
    mapped: str,
    label: str,
    arguments: dict[str, Any],
) -> Any:
    pool = pool_of(node)
    partial = operator.partial(
        task_id=task_id,
        node=node.to_dict(),
        queue=node.queue,
        executor=of_node_tasks(),
        map_index_template=label,
        # Two more than can hold devices: when a job ends, the next is up and waits for them already.
        max_active_tis_per_dagrun=node.devices + 2,
        **arguments,
    )
    # Who names a pool has chosen it.
    if pool is not None and partial.kwargs.get("pool") in (None, DEFAULT_POOL):
        partial.kwargs["pool"] = pool
    # Who waits for a slot of the pool has not asked for devices yet: a higher priority goes first there, too.
    priority = arguments["settings"].priority
    if priority and partial.kwargs.get("priority_weight") in (None, USUAL_WEIGHT):
        partial.kwargs |= {"priority_weight": _weight(priority), "weight_rule": "absolute"}
    return partial.expand(**{mapped: own_item_of(source)})


def _weight(priority: float) -> int:
    """That of tasks of a sweep of this priority: beside it, what Airflow adds up of tasks downstream of
    others counts little."""
    return round(max(-_MOST_WEIGHT, min(_MOST_WEIGHT, priority * _WEIGHT_OF_ONE)))
