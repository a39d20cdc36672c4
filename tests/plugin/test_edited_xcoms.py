"""Whoever may edit the XComs of one DAG takes nobody the list of sweeps, or the page of another."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from airflow.models import import_all_models
from airflow.models.base import Base
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import create_engine, update
from sqlalchemy.orm import Session
from synthetic import Sweep, utc_now

from saturn_airflow.plugin import app as plugin
from saturn_airflow.plugin.choice import job_choice
from saturn_airflow.plugin.latest_sweeps import read_sweeps
from saturn_airflow.plugin.listing import listed
from saturn_airflow.plugin.overview import sweep_page
from saturn_airflow.plugin.queries import DETAILS, read_run
from saturn_airflow.plugin.web_internals import PermittedDagRunFilter, Pool, TaskInstance, XComModel

RUN = "manual__2026"
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 10**15) | st.floats(-1e300, 1e300) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
FIELDS = {
    ("sweep.plan", "plan"): ("makespan", "gap", "jobs", "not_planned", "rung", "nodes", "assignments"),
    ("sweep.report", "return_value"): ("best", "failed", "pruned", "champion", "registered", "jobs"),
}


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    url = f"sqlite:///{tmp_path_factory.mktemp('edited')}/airflow.db"
    engine = create_engine(url)
    import_all_models()  # type: ignore[no-untyped-call]
    Base.metadata.create_all(engine)
    for hours, dag in enumerate(("whole", "edited")):
        Sweep(dag, ["a", "b"], 1, 2, utc_now() - timedelta(hours=5 + hours), run_id=RUN).write(url)
    with Session(engine) as session:
        yield session
    engine.dispose()


def by_dag(session: Session) -> dict[str, Any]:
    found = listed(read_sweeps(session, PermittedDagRunFilter({"whole", "edited"})))
    return {sweep["dag_id"]: sweep for sweep in json.loads(json.dumps(found))}


def overview_of(session: Session) -> Any:
    record = read_run(session, "edited", RUN)
    assert record is not None
    return plugin.answer(sweep_page(record, "sweep", 1.0))


def choice_of(session: Session) -> Any:
    record = read_run(session, "edited", RUN, DETAILS)
    assert record is not None
    return plugin.answer(job_choice(record, "sweep", "a") or {})


@pytest.mark.slow
def test_tasks_that_wait_for_a_pool_that_airflow_does_not_have_are_told_of(session: Session) -> None:
    """Somebody deleted it: Airflow starts none of them, and says so in the scheduler's log alone."""
    trains = (TaskInstance.dag_id == "edited", TaskInstance.task_id.startswith("sweep.train"))
    pool = Pool(pool="saturn.here", slots=1, include_deferred=False)
    try:
        session.execute(update(TaskInstance).where(*trains).values(pool="saturn.here", state="scheduled"))
        found = json.loads(bytes(overview_of(session).body))["missing_pools"]
        session.add(pool)
        session.flush()
        then = json.loads(bytes(overview_of(session).body))["missing_pools"]
        session.execute(update(TaskInstance).where(*trains).values(pool="another", state="success"))
        ended = json.loads(bytes(overview_of(session).body))["missing_pools"]
    finally:
        session.rollback()
    assert found == ["saturn.here"]
    assert then == []
    assert ended == [], "what has ended waits for no pool"


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_the_list_is_there_for_all_others(session: Session, data: st.DataObject) -> None:
    place = data.draw(st.sampled_from(sorted(FIELDS)))
    task, key = place
    mine = (XComModel.dag_id == "edited", XComModel.task_id == task, XComModel.key == key)
    before = by_dag(session)
    try:
        value = session.query(XComModel.value).where(*mine).scalar()
        edited = data.draw(ANYTHING)
        if data.draw(st.booleans()):
            edited = {**value, data.draw(st.sampled_from(FIELDS[place])): edited}
        session.execute(update(XComModel).where(*mine).values(value=edited))
        found = by_dag(session)
        assert found["whole"] == before["whole"]
        best = found["edited"].get("best")
        assert best is None or isinstance(best["metric"], str), "the page takes it for text"
        for read in (overview_of, choice_of):
            with contextlib.suppress(plugin.HTTPException), plugin.in_words():  # type: ignore[attr-defined]
                assert read(session).status_code == 200
    finally:
        session.rollback()
    assert by_dag(session) == before
