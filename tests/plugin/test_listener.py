"""What the listener makes of the states that Airflow gives a sweep's tasks as somebody ends their DAG run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from functools import cache
from typing import Any

import pytest
from airflow.api.common.mark_tasks import set_dag_run_state_to_failed
from airflow.models import import_all_models
from airflow.models.base import Base
from airflow.models.dag import DagModel
from airflow.models.dagbundle import DagBundleModel
from airflow.models.dagrun import DagRun
from airflow.models.taskinstance import TaskInstance, clear_task_instances
from airflow.models.taskmap import TaskMap
from airflow.models.xcom import XComModel
from airflow.sdk import DAG, task
from airflow.serialization.serialized_objects import DagSerialization
from airflow.utils.state import DagRunState
from sqlalchemy import Engine, create_engine, insert, select, text
from sqlalchemy.orm import Session

from saturn_airflow import Cluster, HParams, Job, Node, SaturnSweepOperator
from saturn_airflow.plugin import listener

DAG_ID, RUN_ID = "cancelled", "manual__2026"
MARKED = "Dag Run's state was manually set to `failed`."
TRAIN, REPORT, USE = "sweep.train", "sweep.report", "use"
TRIALS, WAVE = "sweep.trials", "sweep.profile.wave_1"


@cache
def serialized_dag() -> Any:
    """A sweep of one node, and a mapped task that uses what it reports."""

    @task
    def use(job: Any) -> str:
        return str(job)

    with DAG(DAG_ID, schedule=None) as dag:
        sweep = SaturnSweepOperator(
            task_id="sweep",
            jobs=[
                Job(
                    "a",
                    "torch.nn:Linear",
                    "torch.utils.data:DataLoader",
                    model_args={"in_features": 1, "out_features": 1},
                    data_args={"dataset": []},
                    hparams=HParams(epochs=1),
                )
            ],
            cluster=Cluster(Node("a", devices=1, kind="cpu")),
        )
        use.expand(job=sweep.output)
    return DagSerialization.from_dict(DagSerialization.to_dict(dag))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = create_engine(f"sqlite:///{tmp_path_factory.mktemp('listener')}/airflow.db")
    import_all_models()  # type: ignore[no-untyped-call]
    Base.metadata.create_all(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    with Session(engine) as session:
        yield session
        session.rollback()


class Ended:
    """A DAG run in a database, that somebody marks as failed."""

    def __init__(self, session: Session) -> None:
        self.session, self.dag, now = session, serialized_dag(), datetime.now(timezone.utc)
        session.add(DagBundleModel(name="bundle"))
        session.flush()
        session.add(DagModel(dag_id=DAG_ID, bundle_name="bundle", relative_fileloc="x.py", is_paused=True))  # type: ignore[no-untyped-call]
        session.flush()
        own = {"dag_id": DAG_ID, "run_id": RUN_ID}
        session.execute(
            insert(DagRun).values(
                **own, run_type="manual", state="running", start_date=now, run_after=now, logical_date=now
            )
        )
        self.run = session.scalars(select(DagRun)).one()
        self.run.dag = self.dag

    def task(
        self, task_id: str, index: int, state: str | None, returned: bool = False, ago: float = 300.0
    ) -> None:
        """A task instance whose state is of ``ago`` seconds ago."""
        own = {"dag_id": DAG_ID, "run_id": RUN_ID, "task_id": task_id, "map_index": index}
        then = datetime.now(timezone.utc) - timedelta(seconds=ago)
        dates = {"start_date": then, "end_date": then, "updated_at": then}
        more = {"try_number": 1, "pool": "default_pool"}
        self.session.execute(insert(TaskInstance).values(**own, state=state, **dates, **more))
        if returned:
            time.sleep(0.02)  # ids are told apart by milliseconds, a task takes longer
            xcom = {"dag_run_id": self.run.id, "key": "return_value", "value": {"status": "finished"}}
            self.session.execute(insert(XComModel).values(**own, **xcom))

    def instance(self, task_id: str, index: int) -> TaskInstance:
        mine = TaskInstance.task_id == task_id, TaskInstance.map_index == index
        return self.session.scalars(select(TaskInstance).where(*mine)).one()

    def mark(self) -> None:
        set_dag_run_state_to_failed(dag=self.dag, run_id=RUN_ID, commit=True, session=self.session)
        listener.on_dag_run_failed(self.run, MARKED)

    def listed(self, task_id: str, length: int) -> None:
        """How long the list is that a task returned."""
        own = {"dag_id": DAG_ID, "run_id": RUN_ID, "task_id": task_id, "map_index": -1}
        self.session.merge(TaskMap(**own, length=length, keys=None))  # type: ignore[arg-type]
        self.session.flush()

    def check_what_was_removed(self) -> None:
        """What the scheduler does where the DAG has changed."""
        self.session.expire_all()
        self.run.dag = self.dag
        self.run._check_for_removed_or_restored_tasks(self.dag, lambda *_, **__: None, session=self.session)
        self.session.flush()

    def revised(self, task_id: str) -> dict[int, str | None]:
        """The states of a mapped task's instances once the scheduler has seen how long its list is."""
        task = self.dag.get_task(task_id)
        list(self.run._revise_map_indexes_if_mapped(task, dag_version_id=None, session=self.session))
        return self.states(task_id)

    def states(self, task_id: str) -> dict[int, str | None]:
        self.session.expire_all()
        columns = TaskInstance.map_index, TaskInstance.state
        rows = self.session.execute(select(*columns).where(TaskInstance.task_id == task_id))
        return {index: state and str(state) for index, state in rows}


def test_what_had_ended_is_kept_and_what_waited_has_not_succeeded(session: Session) -> None:
    ended = Ended(session)
    ended.task(TRAIN, 0, "success", returned=True)
    ended.task(TRAIN, 1, "running")
    ended.task(TRAIN, 2, "failed")
    ended.task(TRAIN, 3, "scheduled")
    ended.task("sweep.profile.wave_1", -1, "skipped")
    ended.task(REPORT, -1, None)
    ended.task(USE, -1, None)
    for _ in range(2):  # whoever marks it twice changes nothing
        ended.mark()
        assert ended.states(TRAIN) == {0: "success", 1: "failed", 2: "failed", 3: "failed"}
        assert ended.states(REPORT) == ended.states(USE) == {-1: "upstream_failed"}
        assert ended.states("sweep.profile.wave_1") == {-1: "skipped"}, "it was not needed"


@pytest.mark.parametrize("state", [None, "scheduled", "queued", "running"])
def test_what_was_cleared_and_has_not_begun_anew_has_not_succeeded(
    session: Session, state: str | None
) -> None:
    """It still has what its earlier try returned; as a success it would never be trained again."""
    ended = Ended(session)
    ended.task(TRAIN, 0, "success", returned=True)
    ended.task(TRAIN, 1, "running")
    ended.task(TRAIN, 2, "success", returned=True)
    time.sleep(0.02)
    again = ended.instance(TRAIN, 0)
    again.dag_run.created_dag_version_id = None
    clear_task_instances([again], session, dag_run_state=False)
    again.state = state
    session.flush()
    ended.mark()
    assert ended.states(TRAIN) == {0: "failed", 1: "failed", 2: "success"}


def test_tasks_of_the_users_that_failed_stay_so(session: Session) -> None:
    """They may push what counts as returned, and fail then."""
    ended = Ended(session)
    ended.task(REPORT, -1, "success")
    ended.task(USE, 0, "failed", returned=True, ago=1.0)
    ended.task(USE, 1, "running")
    ended.mark()
    assert ended.states(USE) == {0: "failed", 1: "failed"}


@pytest.mark.parametrize(
    ("ago", "report", "msg", "state"),
    [
        (1.0, "success", "success", "failed"),
        (9.0, "success", "success", "success"),  # before the report, which allowed it
        (1.0, "skipped", "success", "success"),
        (1.0, "success", "Dag Run's state was manually set to `success`.", "success"),
    ],
)
def test_a_dag_run_fails_where_a_job_that_was_cleared_alone_has_failed(
    session: Session, ago: float, report: str, msg: str, state: str
) -> None:
    """Its last tasks have succeeded, by which Airflow goes."""
    ended = Ended(session)
    ended.task(TRAIN, 0, "success", returned=True)
    ended.task(TRAIN, 1, "failed", ago=ago)
    ended.task(REPORT, -1, report, ago=5.0)
    ended.run.set_state(DagRunState.SUCCESS)
    listener.on_dag_run_success(ended.run, msg)
    session.flush()
    assert ended.run.state == state


def test_where_the_listener_fails_airflow_s_own_changes_stay(session: Session) -> None:
    """In one transaction with them: on PostgreSQL each later statement would fail, the scheduler's too."""
    ended = Ended(session)
    ended.task(TRAIN, 0, "success", returned=True)
    ended.task(TRAIN, 1, "running")
    ended.task(REPORT, -1, None)
    session.execute(text("ALTER TABLE xcom RENAME COLUMN timestamp TO moved"))
    with pytest.raises(Exception, match="timestamp"):
        ended.mark()
    assert ended.states(REPORT) == {-1: "skipped"}
    assert ended.states(TRAIN) == {0: "failed", 1: "failed"}


@pytest.mark.parametrize("by_clearing", [None, "removed"])
def test_what_is_cleared_after_the_dag_has_changed_has_all_its_instances(
    session: Session, by_clearing: str | None
) -> None:
    """Its list was empty the time before, and has an item now: it would be removed, and never run."""
    cleared = Ended(session)
    cleared.task(TRIALS, -1, None)
    cleared.task(WAVE, 0, by_clearing)
    cleared.task(TRAIN, 0, "removed")
    cleared.task("sweep.plan", -1, "success")
    cleared.listed(TRIALS, 0)
    cleared.listed("sweep.plan", 0)
    listener.on_dag_run_running(cleared.run, "started")
    cleared.check_what_was_removed()
    assert cleared.states(WAVE) == {0: None}
    assert cleared.states(TRAIN) == {0: "removed"}, "its list stands as it is"
    cleared.listed(TRIALS, 1)
    assert cleared.revised(WAVE) == {0: None}
    cleared.listed(TRIALS, 0)
    assert cleared.revised(WAVE) == {0: "removed"}
