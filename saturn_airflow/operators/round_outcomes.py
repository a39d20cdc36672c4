"""What the rounds before this one said, and which of them still stand."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.sdk.exceptions import AirflowRescheduleException

from saturn_airflow.model.outcomes import Outcome
from saturn_airflow.model.problem import Problem
from saturn_airflow.operators.context import SweepContext, outcome_of
from saturn_airflow.operators.train_task import OUTCOME_KEY

if TYPE_CHECKING:
    from saturn_airflow.launch.progress import Progress

log = logging.getLogger(__name__)

#: For how long one job's folder may take to answer: what a training of days says takes minutes to read.
_ANSWER_SECONDS = 300.0
#: Seconds until a folder that did not is asked again, by another process.
_ASK_AGAIN_SECONDS = 30.0


def standing_plans(ti: Any, plans: Sequence[str]) -> list[float]:
    """When the plans of these tasks were made, first to last.

    Where the first was cleared and made anew, Airflow keeps what those behind it said that are now skipped.
    """
    made = [ti.xcom_pull(task_ids=task, key="attempt", map_indexes=-1) for task in plans]
    found = [attempt for attempt in made if attempt is not None]
    return [attempt for attempt in found if attempt >= found[0]]


def now_after(standing: Sequence[float]) -> float:
    """Now, in seconds since the epoch, but after the plans that stand, by which time rounds are told apart.

    A clock may be set back between two rounds, and the machines that plan them may have different ones.

    :param standing: when the plans of earlier rounds were made.
    """
    return max([time.time(), *(made + 0.001 for made in standing)])


def last_outcomes(ti: Any, plans: Sequence[str], trained: Sequence[str]) -> dict[str, Outcome]:
    """Each job's last outcome in the rounds of these plan tasks.

    What train tasks pushed under a plan that was cleared and made anew since does not count.
    """
    attempts = {ti.xcom_pull(task_ids=task, key="attempt", map_indexes=-1) for task in plans}
    pushed = ti.xcom_pull(task_ids=list(trained), key=OUTCOME_KEY) or []
    found = [outcome_of(data) for data in pushed if data and data["attempt"] in attempts]
    return {outcome.job: outcome for outcome in sorted(found, key=lambda outcome: outcome.attempt or 0.0)}


def progress_of(sweep: SweepContext, problem: Problem, standing: Sequence[float]) -> dict[str, Progress]:
    """How far each job has come; those that a user cleared begin anew.

    :param standing: when the plans of earlier rounds were made that still stand.
    :raises AirflowRescheduleException: when a job's folder does not answer; no plan is right without.
    """
    from saturn_airflow.launch import progress, read_apart, restarting

    def of(folder: Path) -> Progress:
        anew = restarting.was_cleared(folder, standing)
        return progress.Progress() if anew else progress.of(folder)

    found = {}
    for job in problem.jobs:
        folder = sweep.job_folder(job.name)
        try:
            found[job.name] = read_apart.within(_ANSWER_SECONDS, str(folder), partial(of, folder))
        except TimeoutError as error:
            log.warning("How far %s is can't be read: %s. Training goes on meanwhile", job.name, error)
            again = timedelta(seconds=_ASK_AGAIN_SECONDS)
            at = datetime.now(timezone.utc) + again
            raise AirflowRescheduleException(at) from None  # type: ignore[no-untyped-call]
    return found
