"""Whether anything has changed since a page last asked, and the curves that have grown since then."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from sqlalchemy import func, select

from saturn_airflow.plugin.queries import PROGRESS, STAGE_OF, seconds
from saturn_airflow.plugin.web_internals import DagRun, TaskInstance, XComModel

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

#: Seconds after which a page gets all anew, what jobs that train have told too: with hundreds of them there
#: is always news. In between it extrapolates by itself, and gets at once what tasks and jobs begin or end.
AT_LEAST_EVERY = 10.0
#: Seconds: what was written at about the same time may be seen later than its time says.
_OVERLAP = 10.0


def mark(session: Session, dag_id: str, run_id: str, now: float) -> str | None:
    """What stays the same for as long as nothing that a page shows of a DAG run changes; None for no run.

    Three queries that count; none of them reads what is to be shown.

    :param now: seconds since the epoch.
    """
    run = session.execute(
        select(DagRun.id, DagRun.state, DagRun.end_date).where(
            DagRun.dag_id == dag_id, DagRun.run_id == run_id
        )
    ).one_or_none()
    if run is None:
        return None
    ti = TaskInstance
    tasks = session.execute(
        select(
            ti.state, func.count(), func.max(ti.start_date), func.max(ti.end_date), func.sum(ti.try_number)
        )
        .where(ti.dag_id == dag_id, ti.run_id == run_id, ti.operator.in_(STAGE_OF))
        .group_by(ti.state)
        .order_by(ti.state)
    ).all()
    xcoms = session.execute(
        select(func.count(), func.max(XComModel.timestamp)).where(
            XComModel.dag_run_id == run[0], XComModel.key != PROGRESS
        )
    ).one()
    counted = int(now / AT_LEAST_EVERY) if str(run[1]) in ("queued", "running") else None
    return etag([[str(value) for value in row] for row in (run, *tasks, xcoms)], counted)


def etag(*told: Any) -> str:
    """An entity tag of what is told."""
    return f'"{hashlib.sha256(json.dumps(told, default=str).encode()).hexdigest()[:32]}"'


def curves(
    session: Session,
    dag_id: str,
    run_id: str,
    group: str,
    since: float | None,
    plans: Collection[float] = (),
) -> tuple[dict[str, Any], float | None]:
    """The curves of a sweep's jobs that were told of after ``since``, by job, the newest of each.

    :param since: what this returned before, in seconds since the epoch; None for all.
    :param plans: when those plans were made that stand: Airflow keeps what the tasks of an earlier one told.
    :returns: the curves (``[step, value]`` by metric), and when the newest were told.
    """
    query = (
        select(XComModel.value, XComModel.timestamp)
        .join(DagRun, DagRun.id == XComModel.dag_run_id)
        .where(
            DagRun.dag_id == dag_id,
            DagRun.run_id == run_id,
            XComModel.key == PROGRESS,
            XComModel.task_id.startswith(f"{group}.", autoescape=True),
        )
        .order_by(XComModel.timestamp)
    )
    if since is not None:
        query = query.where(XComModel.timestamp > datetime.fromtimestamp(since - _OVERLAP, tz=timezone.utc))
    found: dict[str, Any] = {}
    newest = since
    for value, at in session.execute(query):
        newest = seconds(at)
        if not isinstance(value, Mapping) or (plans and value.get("attempt") not in plans):
            continue
        if isinstance(value.get("curves"), Mapping):
            found[value["job"]] = value["curves"]
    return found, newest
