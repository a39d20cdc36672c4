"""The jobs of the sweeps in a DAG file, read without any of Airflow's services."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from airflow.sdk import DAG, conf
from jinja2.exceptions import TemplateError

from saturn_airflow.model.arguments import hint
from saturn_airflow.model.cluster import Cluster
from saturn_airflow.model.errors import SaturnError
from saturn_airflow.model.jobs import Job
from saturn_airflow.operators.airflow_internals import dag_bag
from saturn_airflow.operators.inventory import READ_BY_HAND
from saturn_airflow.operators.trials_task import TrialsOperator


def job_of(
    dag: str, name: str, folder: Path | None = None, sweep: str | None = None, date: str = ""
) -> tuple[Job, Cluster]:
    """A job as its sweep has it, its templates rendered, and the nodes of that sweep.

    :param dag: a DAG's id, or the path of its file.
    :param folder: where DAG files are (default: Airflow's).
    :param sweep: the sweep's task id, where several have a job of that name.
    :param date: the logical date for templates (default: now).
    :raises SaturnError: when there is no such DAG, sweep or job, or it is known only when the DAG runs.
    """
    found = _dag(dag, folder)
    trials = [task for task in found.tasks if isinstance(task, TrialsOperator)]
    if not trials:
        raise SaturnError(f"DAG {found.dag_id!r} has no SaturnSweepOperator")
    if sweep is not None:
        trials = [task for task in trials if task.settings.group == sweep]
    jobs = {task: {job["name"]: job for job in _jobs(task)} for task in trials}
    having = [task for task, by_name in jobs.items() if name in by_name]
    if len(having) > 1:
        groups = ", ".join(task.settings.group for task in having)
        raise SaturnError(f"several sweeps have a job {name!r}: name one of {groups} with --sweep")
    if not having:
        names = [known for by_name in jobs.values() for known in by_name]
        meant = hint(name, names, f"there are {', '.join(names) or 'none'}")
        raise SaturnError(
            f"DAG {found.dag_id!r} has no job {name!r}{f' in {sweep!r}' * bool(sweep)}; {meant}"
        )
    (task,) = having
    try:
        context = _context(found, date)
        rendered = task.render_template(jobs[task][name], context, found.get_template_env())
    except TemplateError as error:
        raise SaturnError(f"job {name!r}: a template of it needs a DAG run ({error})") from None
    return Job.from_dict(rendered), task.settings.cluster


def _dag(dag: str, folder: Path | None) -> DAG:
    file = Path(dag) if dag.endswith(".py") else None
    place = file or folder or Path(conf.get("core", "dags_folder"))
    if not place.exists():
        raise SaturnError(f"{place} does not exist; give a DAG file, or --dags with the folder of DAG files")
    for entry in (folder or (place if place.is_dir() else place.parent), conf.get("core", "plugins_folder")):
        if str(entry) not in sys.path:
            sys.path.append(str(Path(entry).absolute()))
    before = READ_BY_HAND.set(True)
    try:
        bag = dag_bag(str(place))
    finally:
        READ_BY_HAND.reset(before)
    dags: dict[str, DAG] = bag.dags
    if file is not None and len(dags) == 1:
        return next(iter(dags.values()))
    if dag in dags:
        return dags[dag]
    if bag.import_errors:
        where, text = next(iter(bag.import_errors.items()))
        raise SaturnError(f"{where} can't be imported:\n{text.rstrip()}")
    raise SaturnError(
        f"{place} has no DAG {dag!r}; it has {', '.join(sorted(dags)) or 'none'}"
        if file is None
        else f"{place} has {len(dags)} DAGs; name one of {', '.join(sorted(dags))}, with --dags"
        if dags
        else f"{place} has no DAG"
    )


def _jobs(trials: TrialsOperator) -> list[dict[str, Any]]:
    if not isinstance(trials.jobs, list):
        raise SaturnError(
            f"the jobs of sweep {trials.settings.group!r} come from another task, so they are known only "
            "when the DAG runs; write one of them into a DAG file of your own to train it by hand"
        )
    return trials.jobs


def _context(dag: DAG, date: str) -> Any:
    """What templates see outside of a DAG run."""
    try:
        at = datetime.fromisoformat(date) if date else datetime.now(UTC)
    except ValueError:
        raise SaturnError(f"--date {date!r}: write it like 2026-11-22 or 2026-11-22T06:00") from None
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    day, moment = at.date().isoformat(), at.isoformat()
    return {
        "dag": dag,
        "params": dict(dag.params),
        "run_id": f"by_hand__{moment}",
        "logical_date": at,
        "data_interval_start": at,
        "data_interval_end": at,
        "ds": day,
        "ds_nodash": day.replace("-", ""),
        "ts": moment,
    }
