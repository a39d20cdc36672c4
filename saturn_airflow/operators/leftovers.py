"""What a sweep that ends may have left behind: training that nobody follows, checkpoints nobody told of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

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


def add_last_checkpoints(sweep: SweepContext, outcomes: Iterable[dict[str, Any]]) -> None:
    """Complete outcomes of jobs that did not finish by ``checkpoint`` and ``steps``, where there is one."""
    from saturn_airflow.launch import runs

    for outcome in outcomes:
        if outcome["status"] != "finished" and not outcome.get("checkpoint"):
            saved = runs.last_checkpoint(sweep.job_folder(outcome["job"]))
            if saved is not None:
                outcome.update(checkpoint=saved["path"], steps=saved["step"])
                outcome["reason"] = f"{outcome.get('reason') or 'it was lost'}. Saved at step {saved['step']}"
