"""What Airflow's database knows of sweeps, in a few queries however many jobs they have.

Like Airflow's own API, this reads XComs from the database: values that a custom XCom backend keeps elsewhere
are not seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import and_, func, or_, select, tuple_

from saturn_airflow.plugin.web_internals import XCOM_RETURN_KEY, DagRun, TaskInstance, XComModel

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from saturn_airflow.plugin.web_internals import PermittedDagRunFilter

TRIALS, PROFILE, PLAN, TRAIN, REPORT = STAGES = ("trials", "profile", "plan", "train", "report")
#: By their class names the tasks of a sweep are known in the database, with rounds and without.
STAGE_OF = {f"{prefix}{stage.title()}Operator": stage for stage in STAGES for prefix in ("", "Round")}
#: States in which nothing more comes of a task by itself.
ENDED = ("success", "failed", "upstream_failed", "skipped", "removed")
MLFLOW_LINK = "_link_MlflowRunLink"
#: What the page shows of all jobs, and what it shows of one.
OVERVIEW = ("plan", "unplanned", "attempt", "outcome", "profiling", MLFLOW_LINK)
DETAILS = ("jobs", "choices")


@dataclass(frozen=True)
class Task:
    """A task instance. Times are seconds since the epoch.

    :param stage: which of the sweep's stages it belongs to.
    :param name: what its ``map_index_template`` made of it: the job's name, once it has run.
    """

    task_id: str
    map_index: int
    stage: str
    state: str | None
    start: float | None
    end: float | None
    try_number: int
    name: str | None


@dataclass(frozen=True)
class Record:
    """One DAG run as the database has it.

    :param values: XComs by task, map index and key.
    """

    dag_id: str
    run_id: str
    state: str
    start: float | None
    end: float | None
    tasks: tuple[Task, ...] = ()
    values: dict[tuple[str, int, str], Any] = field(default_factory=dict)

    @property
    def is_live(self) -> bool:
        """Whether the DAG run goes on."""
        return self.state in ("queued", "running")

    @property
    def groups(self) -> list[str]:
        """The task groups of its sweeps."""
        return [task.task_id.removesuffix(".trials") for task in self.tasks if task.stage == TRIALS]

    def of(self, group: str, stage: str) -> list[Task]:
        """A sweep's tasks of one stage."""
        return [t for t in self.tasks if t.stage == stage and t.task_id.startswith(f"{group}.")]

    def value(self, task_id: str, key: str, map_index: int = -1) -> Any:
        """What a task pushed, or None."""
        return self.values.get((task_id, map_index, key))

    def all_values(self, tasks: Sequence[Task], key: str) -> Iterator[tuple[Task, Any]]:
        """What these tasks pushed under ``key``, where they did."""
        for task in tasks:
            if (value := self.value(task.task_id, key, task.map_index)) is not None:
                yield task, value


def read_run(session: Session, dag_id: str, run_id: str, keys: Sequence[str] = OVERVIEW) -> Record | None:
    """A DAG run with the tasks of its sweeps and what they pushed; None where there is none.

    :param keys: ``OVERVIEW``, with which the report's return value is read too, or ``DETAILS``, with which
        the plan's is.
    """
    run = session.execute(
        select(DagRun.state, DagRun.start_date, DagRun.end_date).where(
            DagRun.dag_id == dag_id, DagRun.run_id == run_id
        )
    ).one_or_none()
    if run is None:
        return None
    rows = session.execute(
        select(
            TaskInstance.task_id,
            TaskInstance.map_index,
            TaskInstance.operator,
            TaskInstance.state,
            TaskInstance.start_date,
            TaskInstance.end_date,
            TaskInstance.try_number,
            TaskInstance._rendered_map_index,
        )
        .where(
            TaskInstance.dag_id == dag_id,
            TaskInstance.run_id == run_id,
            TaskInstance.operator.in_(STAGE_OF),
        )
        .order_by(TaskInstance.task_id, TaskInstance.map_index)
    ).all()
    tasks = tuple(
        Task(row[0], row[1], STAGE_OF[row[2] or ""], row[3], seconds(row[4]), seconds(row[5]), row[6], row[7])
        for row in rows
    )
    returns = PLAN if keys is DETAILS else REPORT
    values = session.execute(
        select(XComModel.task_id, XComModel.map_index, XComModel.key, XComModel.value).where(
            XComModel.dag_id == dag_id,
            XComModel.run_id == run_id,
            XComModel.task_id.in_({task.task_id for task in tasks}),
            or_(
                XComModel.key.in_(keys),
                and_(
                    XComModel.key == XCOM_RETURN_KEY,
                    XComModel.task_id.in_({task.task_id for task in tasks if task.stage == returns}),
                ),
            ),
        )
    ).all()
    return Record(
        dag_id,
        run_id,
        str(run[0]),
        seconds(run[1]),
        seconds(run[2]),
        tasks,
        {(row[0], row[1], row[2]): row[3] for row in values},
    )


def read_sweeps(
    session: Session, readable: PermittedDagRunFilter, dag_id: str | None = None, limit: int = 50
) -> list[dict[str, Any]]:
    """The latest sweeps of the DAGs the user may read, the newest first.

    :param dag_id: those of one DAG only. Without it, a DAG counts once a sweep of it has listed its trials.
    """
    query = (
        select(
            DagRun.dag_id,
            DagRun.run_id,
            DagRun.state,
            DagRun.start_date,
            DagRun.end_date,
            TaskInstance.task_id,
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
    sweeps = [
        {
            "dag_id": row[0],
            "run_id": row[1],
            "state": str(row[2]),
            "start": seconds(row[3]),
            "end": seconds(row[4]),
            "sweep": row[5].removesuffix(".trials"),
            "jobs": {},
        }
        for row in session.execute(readable.to_orm(query))
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
                sweep["jobs"][state] = sweep["jobs"].get(state, 0) + count
    for key, figures in _figures(session, owners):
        for sweep in _owning(owners, key):
            # The first round's plan is what the sweep was planned to take.
            sweep.update({name: value for name, value in figures.items() if name not in sweep})
    return sweeps


TaskKey = tuple[str, str, str]
Owners = dict[tuple[str, str], list[dict[str, Any]]]


def _owning(owners: Owners, key: TaskKey) -> Iterator[dict[str, Any]]:
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
    """Of each sweep's plan and report the figures only: the database takes them out of the JSON."""
    wanted = {
        "plan": ("makespan", "lower_bound", "gap", "current_practice"),
        XCOM_RETURN_KEY: ("actual_seconds", "utilisation", "best"),
    }
    for key, names in wanted.items():
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
            yield (dag, run, task), dict(zip(names, values, strict=True))


def seconds(moment: datetime | None) -> float | None:
    """Seconds since the epoch."""
    return None if moment is None else moment.timestamp()
