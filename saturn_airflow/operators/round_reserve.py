"""Rounds that are not needed are skipped at once, so that a sweep's end does not wait for them."""

from __future__ import annotations

import logging
import time
from typing import Any

from airflow.sdk import Context, TaskInstanceState

from saturn_airflow.model.settings import SweepSettings
from saturn_airflow.model.status import Status
from saturn_airflow.operators.airflow_internals import skip_tasks
from saturn_airflow.operators.round_watch import ENDED
from saturn_airflow.operators.train_task import OUTCOME_KEY

#: A watch that looks just now can't be skipped; its look takes a few seconds.
_LOOK_SECONDS = 10.0
#: States of tasks that do not train yet, or not again: whoever sees one is not the last. No state is `null`.
_TO_COME = ["null", *(s.value for s in TaskInstanceState if s not in (*ENDED, TaskInstanceState.RUNNING))]

log = logging.getLogger(__name__)


def skip_rounds_after(context: Context, settings: SweepSettings, number: int) -> None:
    """Have Airflow skip all rounds after this one.

    Whether that works is a matter of seconds only: a round that is not needed finds that out itself.
    """
    try:
        skip_tasks(_rounds_after(context, settings, number))
    except Exception as error:  # of Airflow's API
        log.warning("The rounds after this one are not skipped yet: %s", error)


def skip_watch_after_last(
    context: Context, settings: SweepSettings, number: int, node: str, reserve: bool
) -> None:
    """Have Airflow skip the watch of round ``number``, if all other training in it has ended.

    The report would wait for its next look, which is an hour away where a clock was set back by that.
    The same holds as for :func:`skip_rounds_after`. Airflow is asked for a number first: that of each task's
    state by all tasks would grow with the square of the jobs.

    :param context: of the task that trains on ``node`` in that round, and is about to end.
    :param reserve: whether to skip the rounds after it, too: only the one in reserve is left.
    """
    ti: Any = context["ti"]
    watch = ti.task_id.removesuffix(f"train.{node}") + "watch"
    until = time.monotonic() + _LOOK_SECONDS
    try:
        watching: Any = context["dag"].get_task(watch)
        trains = list(watching.train_tasks.values())
        if ti.get_ti_count(dag_id=ti.dag_id, task_ids=trains, run_ids=[ti.run_id], states=_TO_COME):
            return
        asked = [watch, *trains]
        while True:
            found = ti.get_task_states(dag_id=ti.dag_id, task_ids=asked, run_ids=[ti.run_id])
            states = found.get(ti.run_id, {})
            looks = states.pop(watch, None) == TaskInstanceState.RUNNING
            wanted = states.pop(f"{ti.task_id}_{ti.map_index}", None) == TaskInstanceState.RUNNING
            if not (wanted and all(_is_over(ti, key, state) for key, state in states.items())):
                return
            skip_tasks([watch, *(_rounds_after(context, settings, number) if reserve else ())])
            # The next round must not wait for a look at this one.
            if not (looks and reserve) or time.monotonic() > until:
                return
            time.sleep(0.3)
    except Exception as error:  # of Airflow's API
        log.warning("%s is not skipped yet: %s", watch, error)


def _rounds_after(context: Context, settings: SweepSettings, number: int) -> list[str]:
    groups = tuple(f"{settings.group}.round_{n}." for n in range(number + 1, settings.last_round + 1))
    return [task for task in context["dag"].task_ids if task.startswith(groups)]


def _is_over(ti: Any, key: str, state: str | None) -> bool:
    """Whether a train task has ended, or is about to: of two that end at once, one at least sees the other.

    :param key: the task's id, with its map index behind a ``_``.
    """
    if state != TaskInstanceState.RUNNING:
        return state in ENDED
    task, _, index = key.rpartition("_")
    outcome = ti.xcom_pull(task_ids=task, key=OUTCOME_KEY, map_indexes=int(index))
    return bool(outcome) and outcome["status"] == Status.FINISHED
