"""Asking for devices in the plan's order."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from airflow.sdk import Context

from saturn_airflow.model.entries import PlanEntry
from saturn_airflow.model.settings import SweepSettings
from saturn_airflow.operators.context import SweepContext

#: For how long a job waits for those before it in the plan to ask for their devices first; some may never do.
LET_GO_FIRST_SECONDS = 30.0
#: For how long one of their folders may take to answer, until it is asked again.
_ANSWER_SECONDS = 1.0


def wait_for_those_before(
    context: Context, settings: SweepSettings, entry: PlanEntry, must_go: Callable[[], bool]
) -> None:
    """Wait until those who have the devices of ``entry`` before it in the plan have asked for them.

    Who asks stands in the plan's order. But tasks that are queued in this order may start in another, and
    the first to ask would find its devices free.
    """
    from saturn_airflow.launch import past_runs, read_apart

    sweep = SweepContext.of(context, settings.group)
    until = time.monotonic() + LET_GO_FIRST_SECONDS
    for job in entry.after:
        asked = partial(past_runs.has_asked, sweep.job_folder(job), entry.attempt)
        has_asked = False
        while not has_asked:
            with suppress(TimeoutError):
                has_asked = read_apart.within(_ANSWER_SECONDS, f"whether {job} has asked", asked)
            if not has_asked:
                if must_go() or time.monotonic() > until:
                    return
                time.sleep(0.1)
