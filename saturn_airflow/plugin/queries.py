"""What Airflow's database knows of sweeps, in a few queries however many jobs they have.

Like Airflow's own API, this reads XComs from the database: values that a custom XCom backend keeps elsewhere
are not seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import and_, or_, select

from saturn_airflow.plugin.web_internals import XCOM_RETURN_KEY, DagRun, Pool, TaskInstance, XComModel

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

TRIALS, PROFILE, PLAN, TRAIN, REPORT = STAGES = ("trials", "profile", "plan", "train", "report")
#: By their class names the tasks of a sweep are known in the database, with rounds and without.
STAGE_OF = {f"{prefix}{stage.title()}Operator": stage for stage in STAGES for prefix in ("", "Round")}
#: States in which nothing more comes of a task by itself.
ENDED = ("success", "failed", "upstream_failed", "skipped", "removed")
#: Those of tasks that have ended without having run.
NEVER_RAN = {"upstream_failed", "skipped", "removed"}
#: Keys of XComs: the link that Airflow keeps of MlflowRunLink, and what train tasks tell while they run.
MLFLOW_LINK = "_link_MlflowRunLink"
PROGRESS, LATE = "progress", "late"
#: Keys of the XComs that the page shows of all jobs, and of those it shows of one.
OVERVIEW = ("plan", "unplanned", "attempt", "outcome", "profiling", LATE, MLFLOW_LINK)
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
class Told:
    """What a train task told of its job while it trained.

    :param attempt: when the plan was made that the task belongs to, in seconds since the epoch.
    :param now: how far the job has come.
    """

    attempt: float
    now: dict[str, Any]


@dataclass(frozen=True)
class Record:
    """One DAG run as the database has it.

    :param values: XComs by task, map index and key.
    :param progress: what train tasks told last of how far their jobs have come, by task and map index.
    :param missing_pools: those in which tasks wait, though Airflow does not have them any more.
    """

    dag_id: str
    run_id: str
    state: str
    start: float | None
    end: float | None
    tasks: tuple[Task, ...] = ()
    values: dict[tuple[str, int, str], Any] = field(default_factory=dict)
    progress: dict[tuple[str, int], Told] = field(default_factory=dict)
    missing_pools: tuple[str, ...] = ()

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
        select(DagRun.state, DagRun.start_date, DagRun.end_date, DagRun.id).where(
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
            XComModel.dag_run_id == run[3],
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
        _progress(session, run[3]) if keys is OVERVIEW else {},
        _missing_pools(session, dag_id, run_id) if keys is OVERVIEW else (),
    )


def ended_runs(session: Session, runs: Set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Those of ``runs`` that have ended, each a DAG's id and its run's."""
    rows = session.execute(
        select(DagRun.dag_id, DagRun.run_id).where(
            DagRun.dag_id.in_({dag for dag, _ in runs}),
            DagRun.run_id.in_({run for _, run in runs}),
            DagRun.state.in_(("success", "failed")),
        )
    )
    return {(dag, run) for dag, run in rows} & runs


def _missing_pools(session: Session, dag_id: str, run_id: str) -> tuple[str, ...]:
    """The pools in which tasks of a DAG run wait, and which Airflow does not have."""
    # Airflow starts no task of a pool that it does not have, and says so in the scheduler's log alone.
    rows = session.scalars(
        select(TaskInstance.pool)
        .distinct()
        .outerjoin(Pool, Pool.pool == TaskInstance.pool)
        .where(
            TaskInstance.dag_id == dag_id,
            TaskInstance.run_id == run_id,
            TaskInstance.state == "scheduled",
            Pool.pool.is_(None),
        )
    )
    return tuple(sorted(rows))


def _progress(session: Session, run: int) -> dict[tuple[str, int], Told]:
    """What the train tasks of a DAG run told last, by task and map index."""
    # The curves are left in the database: they are most of it, and were mostly seen before.
    # As a number: databases shorten it when they write it as JSON.
    attempt, now = XComModel.value["attempt"].as_float(), XComModel.value["now"]
    rows = session.execute(
        select(XComModel.task_id, XComModel.map_index, attempt, now).where(
            XComModel.dag_run_id == run, XComModel.key == PROGRESS
        )
    )
    return {(row[0], row[1]): Told(row[2], dict(row[3])) for row in rows if isinstance(row[3], Mapping)}


def seconds(moment: datetime | None) -> float | None:
    """``moment`` in seconds since the epoch."""
    return None if moment is None else moment.timestamp()
