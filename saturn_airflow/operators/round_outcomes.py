"""What the rounds before this one said, and which of them still stand."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saturn_airflow.model.outcomes import Outcome
from saturn_airflow.model.problem import Problem
from saturn_airflow.operators.context import SweepContext, outcome_of
from saturn_airflow.operators.train_task import OUTCOME_KEY

if TYPE_CHECKING:
    from saturn_airflow.launch.progress import Progress


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
    """
    from saturn_airflow.launch import progress, restarting

    def of(folder: Path) -> Progress:
        anew = restarting.was_cleared(folder, standing)
        return progress.Progress() if anew else progress.of(folder)

    return {job.name: of(sweep.job_folder(job.name)) for job in problem.jobs}
