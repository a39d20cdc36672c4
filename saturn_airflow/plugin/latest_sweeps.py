"""The latest sweeps as Airflow's database knows them, read in four queries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from sqlalchemy import and_, func, or_, select, tuple_

from saturn_airflow.plugin.queries import REPORT, STAGE_OF, TRAIN, seconds
from saturn_airflow.plugin.web_internals import XCOM_RETURN_KEY, DagRun, TaskInstance, XComModel

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from saturn_airflow.plugin.web_internals import PermittedDagRunFilter


def read_sweeps(
    session: Session, readable: PermittedDagRunFilter, dag_id: str | None = None, limit: int = 50
) -> list[dict[str, Any]]:
    """The latest sweeps of the DAGs the user may read, the newest first.

    :param dag_id: those of one DAG only. Without it, a DAG counts once a sweep of it has listed its trials.
    :returns: of each, ``dag_id``, ``run_id``, ``state`` (the run's), ``start`` and ``end`` in seconds since
        the epoch, ``sweep`` (its task group), ``trials`` and ``report`` (these tasks' states), ``tasks`` (how
        many train tasks are in which state, by round), and those of ``_FIGURES`` that its tasks have pushed.
    """
    sweeps = [
        {
            "dag_id": row[0],
            "run_id": row[1],
            "state": str(row[2]),
            "start": seconds(row[3]),
            "end": seconds(row[4]),
            "sweep": row[5].removesuffix(".trials"),
            "trials": row[6],
            "tasks": {},
        }
        for row in session.execute(readable.to_orm(_latest(dag_id, limit)))
    ]
    if not sweeps:
        return []
    owners: Owners = {}
    for sweep in sweeps:
        owners.setdefault((sweep["dag_id"], sweep["run_id"]), []).append(sweep)
    for key, is_report, state, count in _states(session, owners):
        for sweep in _owning(owners, key):
            if is_report:
                sweep["report"] = state
            else:
                train = key[2].removeprefix(sweep["sweep"] + ".")
                round = train.partition(".")[0] if train.startswith("round_") else ""
                states = sweep["tasks"].setdefault(round, {})
                states[state] = states.get(state, 0) + count
    for key, figures in _figures(session, owners):
        for sweep in _owning(owners, key):
            # The first round's plan is what the sweep was planned to take.
            sweep.update({name: value for name, value in figures.items() if name not in sweep})
    return sweeps


def _latest(dag_id: str | None, limit: int) -> Any:
    """Asks for the latest DAG runs with a sweep, and for how far the task is that begins it."""
    query = (
        select(
            DagRun.dag_id,
            DagRun.run_id,
            DagRun.state,
            DagRun.start_date,
            DagRun.end_date,
            TaskInstance.task_id,
            TaskInstance.state,
        )
        .join(TaskInstance, and_(TaskInstance.dag_id == DagRun.dag_id, TaskInstance.run_id == DagRun.run_id))
        .where(TaskInstance.operator == "TrialsOperator")
        .order_by(DagRun.run_after.desc(), DagRun.id.desc(), TaskInstance.task_id)
        .limit(limit)
    )
    if dag_id is None:
        # The key is indexed, the operator's name is not: in a large deployment that counts.
        having = select(XComModel.dag_id).where(XComModel.key == "sweep").distinct()
        query = query.where(DagRun.dag_id.in_(having))
    else:
        query = query.where(DagRun.dag_id == dag_id)
    return query


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_best(value: Any) -> bool:
    has_texts = _is_mapping(value) and all(isinstance(value.get(key), str) for key in ("job", "metric"))
    return has_texts and _is_number(value.get("value"))


#: What is shown of a plan and of a report, and what it has to be.
_FIGURES: Mapping[str, Mapping[str, Callable[[Any], bool]]] = {
    "plan": {
        **dict.fromkeys(("makespan", "lower_bound", "gap", "current_practice"), _is_number),
        **dict.fromkeys(("jobs", "not_planned"), _is_number),
        "rung": lambda value: True,
    },
    XCOM_RETURN_KEY: {
        **dict.fromkeys(("actual_seconds", "utilisation"), _is_number),
        **dict.fromkeys(("failed", "pruned"), _is_list),
        **dict.fromkeys(("champion", "registered"), _is_mapping),
        "best": _is_best,
    },
}
TaskKey = tuple[str, str, str]
"""Ids of a DAG, of its run and of a task."""
Owners = dict[tuple[str, str], list[dict[str, Any]]]
"""The sweeps of each DAG run, by the ids of the DAG and of the run."""


def _owning(owners: Owners, key: TaskKey) -> Iterator[dict[str, Any]]:
    """The sweeps that a task is of: one, unless a group's name begins with another's and a dot."""
    dag_id, run_id, task_id = key
    for sweep in owners[dag_id, run_id]:
        if task_id.startswith(sweep["sweep"] + "."):
            yield sweep


def _states(session: Session, owners: Owners) -> Iterator[tuple[TaskKey, bool, str, int]]:
    """How many instances of each train task, and of each report, are in which state."""
    reports = [name for name, stage in STAGE_OF.items() if stage == REPORT]
    train = [name for name, stage in STAGE_OF.items() if stage == TRAIN]
    rows = session.execute(
        select(
            TaskInstance.dag_id,
            TaskInstance.run_id,
            TaskInstance.task_id,
            TaskInstance.operator,
            TaskInstance.state,
            func.count(),
        )
        .where(
            tuple_(TaskInstance.dag_id, TaskInstance.run_id).in_(list(owners)),
            or_(
                TaskInstance.operator.in_(reports),
                and_(TaskInstance.operator.in_(train), TaskInstance.map_index >= 0),
            ),
        )
        .group_by(
            TaskInstance.dag_id,
            TaskInstance.run_id,
            TaskInstance.task_id,
            TaskInstance.operator,
            TaskInstance.state,
        )
    )
    for dag, run, task, operator, state, count in rows:
        yield (dag, run, task), operator in reports, state or "waiting", count


def _figures(session: Session, owners: Owners) -> Iterator[tuple[TaskKey, dict[str, Any]]]:
    """Of each sweep's plan and report the figures only: the database takes them out of the JSON.

    Whoever may edit XComs may have changed them: what can't be shown is left out, so that the list is there
    for all others.
    """
    for key, names in _FIGURES.items():
        stage = "plan" if key == "plan" else "report"
        rows = session.execute(
            select(
                XComModel.dag_id,
                XComModel.run_id,
                XComModel.task_id,
                *(XComModel.value[name] for name in names),
            )
            .where(
                tuple_(XComModel.dag_id, XComModel.run_id).in_(list(owners)),
                XComModel.key == key,
                XComModel.task_id.endswith(f".{stage}", autoescape=True),
            )
            .order_by(XComModel.task_id)
        )
        for dag, run, task, *values in rows:
            told = zip(names.items(), values, strict=True)
            yield (dag, run, task), {name: value if is_one(value) else None for (name, is_one), value in told}
