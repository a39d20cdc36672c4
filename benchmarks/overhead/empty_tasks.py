"""The DAG that benchmarks/overhead.py holds sweeps against: Airflow's mapped tasks, on the same workers."""

from __future__ import annotations

import json
import os
import time

import psutil
from airflow.sdk import dag, task

#: Seconds that each task of a node sleeps.
SLEEPS: dict[str, list[float]] = json.loads(os.environ.get("EMPTY_TASKS", "{}"))
#: How many of a node's run at once.
AT_ONCE = int(os.environ.get("EMPTY_TASKS_AT_ONCE", "1"))


def sleep(seconds: float, tells: bool) -> dict[str, float] | None:
    """Sleep; who ``tells`` says what its process takes, in MB, as ``memory_of`` counts it."""
    time.sleep(seconds)
    if not tells:
        return None
    own = psutil.Process().memory_full_info()
    return {"rss": own.rss / 2**20, "pss": own.pss / 2**20, "uss": own.uss / 2**20}


if SLEEPS:

    @dag(schedule=None, catchup=False)
    def empty_tasks() -> None:
        for node, sleeps in SLEEPS.items():
            asleep = task(
                task_id=node,
                queue=f"saturn.{node}",
                max_active_tis_per_dagrun=AT_ONCE,
                multiple_outputs=False,
            )(sleep)
            asleep.expand_kwargs([{"seconds": s, "tells": i == 0} for i, s in enumerate(sleeps)])

    empty_tasks()
