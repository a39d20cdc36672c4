"""Several DAG runs at once, as in a backfill: one measures, the others wait for what it finds."""

from __future__ import annotations

import contextlib
import fcntl
import json
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from airflow.sdk import Context

from saturn_airflow.model import json_text
from saturn_airflow.model.disks import write_whole
from saturn_airflow.model.folders import slug
from saturn_airflow.operators.context import SweepContext, home
from saturn_airflow.operators.following import STILL_WANTED

#: Seconds between two looks whether the other run has measured.
LOOK_AGAIN_SECONDS = 10.0
#: A run that has not made a plan so long after it began to measure is not waited for.
_LONGEST_SECONDS = 3600.0


def who_measures(
    context: Context, sweep: SweepContext, plan_task: str, fingerprints: Collection[str]
) -> str | None:
    """Take the turn to measure jobs, unless another run of this DAG is measuring some of them just now.

    A run's turn ends when its plan is made, or can't be made any more.

    :param plan_task: the task of the sweep that makes use of what was measured.
    :returns: the id of the other run; None where this one measures.
    """
    folder = home() / "measuring" / slug(sweep.dag_id) / slug(sweep.group_id)
    folder.mkdir(parents=True, exist_ok=True)
    own = folder / f"{slug(sweep.run_id)}.json"
    with _alone(folder):
        for path in folder.glob("*.json"):
            note = read_note(path)
            if path == own:
                continue
            if note is None or abs(time.time() - note["since"]) > _LONGEST_SECONDS:  # clocks may be set back
                path.unlink()
            elif note["fingerprints"] & set(fingerprints):
                if _has_no_plan_yet(context["ti"], note["run_id"], plan_task):
                    # Who waits measures nothing: two runs that were cleared would wait for each other.
                    own.unlink(missing_ok=True)
                    return str(note["run_id"])
                path.unlink()
        # Whole or not there: a damaged note would be in the way of all later runs.
        note = {"run_id": sweep.run_id, "fingerprints": sorted(fingerprints), "since": time.time()}
        write_whole(own, json.dumps(note))
    return None


def read_note(path: Path) -> dict[str, Any] | None:
    """A run's note (``run_id``, ``fingerprints``, ``since``); None for one that is damaged."""
    try:
        note = json_text.parse(path.read_text())
        run_id, fingerprints, since = str(note["run_id"]), set(map(str, note["fingerprints"])), note["since"]
        return {"run_id": run_id, "fingerprints": fingerprints, "since": float(since)}
    except (ValueError, KeyError, TypeError, OverflowError):
        return None


def _has_no_plan_yet(ti: Any, run_id: str, plan_task: str) -> bool:
    found = ti.get_task_states(dag_id=ti.dag_id, task_ids=[plan_task], run_ids=[run_id])
    states = list(found.get(run_id, {}).values())
    return bool(states) and states[0] in STILL_WANTED


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    with open(folder / "lock", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
