"""Before a train task does anything: does its job go on with what was trained, or does it start anew?"""

from __future__ import annotations

import shlex
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.sdk import Context

from saturn_airflow.model.definition import Change, Definition
from saturn_airflow.model.entries import PlanEntry
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.folders import superseded
from saturn_airflow.model.jobs import Job
from saturn_airflow.model.status import Status
from saturn_airflow.operators import wishes
from saturn_airflow.operators.code_version import as_text, code_version
from saturn_airflow.operators.context import hide_secrets
from saturn_airflow.operators.edited_jobs import edits
from saturn_airflow.operators.retrying import TryAgainError, cleared_after

if TYPE_CHECKING:
    from saturn_airflow.launch.restarting import Asker, RestartDecision


def asker_of(entry: PlanEntry, ti: Any, retries: int) -> Asker:
    """The try of a train task, as what decides about its job's training knows it."""
    from saturn_airflow.launch.restarting import Asker

    standing = entry.standing or (entry.goes_on[:1] if entry.goes_on else ())
    cleared = cleared_after(int(ti.max_tries or 0), retries)
    return Asker(entry.attempt, ti.try_number, cleared, standing)


def decide(context: Context, folder: Path, task: Any, asker: Asker) -> RestartDecision:
    """Whether the job of ``task`` goes on with the training in ``folder``, or starts anew.

    :raises InvalidSweepError: when the DAG run's conf can't be read; when the job was cleared alone, and the
        DAG's file says something else of it than its plan.
    :raises NewerFormatError: when a newer version wrote what is there in a way that this one can't read.
    """
    from saturn_airflow.launch import restarting

    job: Job = task.entry.job
    restarting.complete(folder)
    if (run := restarting.cleared_under_its_plan(folder, asker)) and (changes := edits(job, task)):
        run.stop()  # it may train on where Airflow could not be asked whether it was wanted
        raise InvalidSweepError(_edited(context, task, changes))
    now = Definition.of(job, as_text(code_version(context)))
    wish = wishes.wish(wishes.conf_of(context), job.name)
    return restarting.decide(folder, now, asker, wish, in_words)


def supersede(folder: Path, why: str, mlflow: str) -> None:
    """Set the training in ``folder`` aside; what it said last, and that it is superseded, goes to MLflow.

    :param mlflow: its tracking URI.
    :raises TryAgainError: when it can't be stopped, or its records are just being sent; a retry does it.
    """
    from saturn_airflow import tracking
    from saturn_airflow.launch import restarting, runs

    job_run = tracking.reopen_job(mlflow, folder)
    end = None
    for run in runs.all_of(folder):
        run.stop()
        if run.is_alive():
            raise TryAgainError(f"{run.folder} trains on another machine and has not stopped yet")
        run.read_on()
        for event in run.events():
            if job_run is not None and event["event"] != "waiting":
                job_run.follow(event)
        end = run.end
    if job_run is not None:
        job_run.supersede(why, ended=end is not None and end["status"] == Status.FINISHED)
    with tracking.nobody_sends(folder) as nobody:
        if not nobody:
            raise TryAgainError(f"the records of {folder} are being sent to MLflow; they can't move yet")
        restarting.set_aside(folder, why)


def warnings(job: str, folder: Path, decision: RestartDecision) -> Iterator[str]:
    """What the user is told of ``job`` as it begins.

    :param folder: where its training is; what was set aside lies there, too.
    """
    from saturn_airflow.launch import restarting
    from saturn_airflow.tracking.outbox import FOLDER

    if decision.why_anew is not None:
        aside = folder / superseded(restarting.number(folder) - 1)
        why = decision.why_anew
        yield f"{job} is trained from the beginning: {why}. What was trained before is in {aside}"
    elif decision.changes:
        changes = "; ".join(map(in_words, decision.changes))
        yield f"{job} goes on as asked, though its definition has changed: {changes}"
    if not (folder.parent / FOLDER).is_dir():
        yield (
            f"{folder.parent} has nothing of what the sweep's first task wrote there: [saturn] home is "
            f"another folder on {socket.gethostname()} than where plans are made, or somebody removed it. "
            "Plans and reports then don't see how far jobs are, and jobs that move begin anew: give all "
            "machines one shared folder (`saturn doctor` looks for it)"
        )


def _edited(context: Context, task: Any, changes: Sequence[Change]) -> str:
    """What is to be done about a job that was cleared, and has another definition in the DAG's file."""
    ti: Any = context["ti"]
    name, trials = task.entry.name, task.settings.trials_task
    again = shlex.join(["saturn", "restart", ti.dag_id, ti.run_id, name, "--as-planned"])
    return (
        f"{name} was cleared, and the DAG's file says something else of it than the plan that this task "
        f"trains by: {'; '.join(map(in_words, changes))}. To train what the file says now, clear "
        f"{trials} with all that is downstream of it. To train what was planned, run "
        f"`{again}`, and clear this task again"
    )


def in_words(change: Change) -> str:
    """A change as a log may show it, without secrets."""
    before, now = (hide_secrets({change.field: value})[change.field] for value in (change.before, change.now))
    return f"{change.field} was {before} and is {now}"
