"""What the report says of jobs whose train tasks have told nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from airflow.sdk import TaskInstanceState

from saturn_airflow.model import untold_ends
from saturn_airflow.model.entries import PlanEntry

_OF_INSTANCE = re.compile(r"_\d+$")


def why_lost(ti: Any, report: Any, jobs: Sequence[str]) -> Mapping[str, str]:
    """Why the train tasks of ``jobs`` left no outcome, by the jobs' names: an edit of the DAG may have taken
    them away, or somebody has marked them by hand.

    :param report: the task that asks.
    """
    states = ti.get_task_states(dag_id=ti.dag_id, run_ids=[ti.run_id]).get(ti.run_id, {})
    own = f"{report.settings.group}."
    gone = {
        name if report.dag.has_task(name) else _OF_INSTANCE.sub("", name)
        for name, state in states.items()
        if name.startswith(own) and ".train" in name and state == TaskInstanceState.REMOVED
    }
    if gone := {name for name in gone if not report.dag.has_task(name)}:
        why = (
            f"the DAG was changed as the sweep ran, and Airflow removed its train tasks ({min(gone)}): with "
            "other nodes or rounds a sweep has other tasks. Clear the DAG run: what is saved goes on"
        )
        return dict.fromkeys(jobs, why)
    last: dict[str, Any] = {}
    for job, task, index in _instances(ti, report.plan_tasks, report.train_tasks):
        state = states.get(f"{task}_{index}", states.get(task))
        if state is not None:
            last.setdefault(job, getattr(state, "value", state))
    return {job: untold_ends.in_words(last.get(job)) for job in jobs}


def _instances(ti: Any, plans: Sequence[str], trained: Sequence[str]) -> Iterator[tuple[str, str, int]]:
    """Of each job the task and the number of the instance that was to train it, the last round first."""
    for plan in reversed(plans):
        told = ti.xcom_pull(task_ids=plan, key="return_value", map_indexes=-1) or []
        places: dict[str, int] = {}
        for entry in map(PlanEntry.from_dict, told):
            stage = f"{plan.rpartition('.')[0]}.train"
            task = stage if stage in trained else f"{stage}.{entry.node}"
            places[task] = places.get(task, -1) + 1
            yield entry.name, task, places[task]
