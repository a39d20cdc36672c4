"""What a sweep that ends may have left behind: training that nobody follows, checkpoints nobody told of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from saturn_airflow.model.outcomes import Outcome
from saturn_airflow.model.status import Status
from saturn_airflow.operators.context import SweepContext


def stop_leftovers(
    sweep: SweepContext, jobs: Iterable[str], log: Callable[[str], object] = lambda line: None
) -> None:
    """Tell training of these jobs to stop, on whatever node; the tasks that followed it are all gone.

    Training on a node that can't be reached now hears of it once the sweep's folder is there again.
    """
    from saturn_airflow.launch import runs

    for job in jobs:
        run = runs.attach(sweep.job_folder(job))
        if run is not None:
            log(f"{job} still trains in {run.folder}, and no task follows it any more: it is stopped")
            run.stop()


def with_last_checkpoints(sweep: SweepContext, outcomes: Iterable[Outcome]) -> list[Outcome]:
    """``outcomes``, with the last checkpoint and its step where a job did not finish."""
    from saturn_airflow.launch import runs

    found = []
    for outcome in outcomes:
        if outcome.status != Status.FINISHED and not outcome.checkpoint:
            saved = runs.last_checkpoint(sweep.job_folder(outcome.job))
            if saved is not None:
                reason = f"{outcome.reason or 'it was lost'}. Saved at step {saved['step']}"
                outcome = replace(outcome, checkpoint=saved["path"], steps=saved["step"], reason=reason)
        found.append(outcome)
    return found
