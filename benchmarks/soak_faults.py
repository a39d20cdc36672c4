"""The faults of benchmarks/soak.py: which kinds there are, and a table of what came of them."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soak_checks import events

#: What ends a training, what ends the task that follows it, and what ends neither.
OF_JOBS = ("rank killed", "supervisor killed", "task cleared", "task killed")
LOST = "message lost with its worker"
PLANNER = "plan task killed"
OF_NODES = (
    "worker killed",
    "worker's main process killed",
    "node lost for 3 s",
    "fork server killed",
    "node upgraded",
    LOST,
)
OF_SERVICES = {
    "scheduler": 0.0,
    "dag-processor": 0.0,
    "triggerer": 0.0,
    "redis": 0.0,
    "postgres": 0.0,
    "airflow": 15.0,
    "mlflow": 15.0,
    "head upgraded": 0.0,
}
ENDS_TRAINING = (*OF_JOBS[:3], "node lost for 3 s")
ENDS_TASK = ("task killed", "worker killed", "worker's main process killed", "node upgraded", LOST)
#: What a try of Airflow's can't begin without, and the seconds that it needs to come back on a busy machine.
OF_THE_HEAD = ("airflow", "scheduler", "postgres", "redis", "head upgraded")
HEAD_IS_BACK = 60.0


@dataclass
class Fault:
    """What happened, and to which training.

    :param folder: the job's; None where nothing trained.
    :param step: its last before.
    """

    kind: str
    time: float
    folder: Path | None
    step: int
    was_let_go: bool = False
    followed_after: float | None = None


def outcome_of(fault: Fault) -> dict[str, float | None]:
    """Seconds until the job trained or was followed again and until it asked for devices, and steps again."""
    if fault.folder is None:
        return {"seconds": None, "steps": None, "asked": None}
    seen = [e for e in events(fault.folder) if e["time"] > fault.time]
    if fault.kind in ENDS_TRAINING:
        starts = [e for e in seen if e["event"] == "start"]
        if not starts:
            return {"seconds": None, "steps": None, "asked": None}
        start = starts[0]
        before_it = {e["run"] for e in events(fault.folder) if e["time"] <= fault.time}
        next_run = next((e for e in seen if e["run"] not in before_it), start)
        step = next((e for e in seen if e["event"] == "step" and e["time"] > start["time"]), start)
        before = [
            e["step"] for e in events(fault.folder) if e["event"] == "step" and e["time"] < start["time"]
        ]
        # One that had not taken a step yet has none to train again.
        steps = max(before, default=start["step"]) - start["step"]
        asked = next_run["time"] - fault.time
        return {"seconds": step["time"] - fault.time, "steps": steps, "asked": asked}
    if fault.kind in ENDS_TASK:
        return {"seconds": fault.followed_after, "steps": 0, "asked": None}
    step = next((e for e in seen if e["event"] == "step"), {})
    return {"seconds": step["time"] - fault.time if step else None, "steps": 0, "asked": None}


def met_no_other(fault: Fault, seconds: float, faults: list[Fault]) -> bool:
    """Whether the head was there from this fault until the job was back."""
    ends = [f.time for f in faults if f is not fault and f.kind.removesuffix(" killed") in OF_THE_HEAD]
    return not any(fault.time - HEAD_IS_BACK < moment < fault.time + seconds for moment in ends)


def table(faults: list[Fault]) -> list[dict[str, Any]]:
    """A row for each kind of fault."""
    rows = []
    for kind in sorted({fault.kind for fault in faults}):
        of_kind = [(fault, outcome_of(fault)) for fault in faults if fault.kind == kind]
        outcomes = [outcome for _, outcome in of_kind]
        seconds = [o["seconds"] for o in outcomes if o["seconds"] is not None]
        steps = [o["steps"] for o in outcomes if o["steps"] is not None]
        asked = [o["asked"] for o in outcomes if o["asked"] is not None]
        alone = [
            o["seconds"]
            for fault, o in of_kind
            if o["seconds"] is not None and met_no_other(fault, o["seconds"], faults)
        ]
        what = "followed" if kind in ENDS_TASK else "trained"
        rows.append(
            {
                "fault": kind,
                "count": len(outcomes),
                f"seconds_until_{what}_again": _spread(seconds),
                "steps_trained_again": _spread(steps),
                **({"seconds_until_devices_were_asked_for": _spread(asked)} if asked else {}),
                **(
                    {"with_the_head_there": {"count": len(alone), "seconds": _spread(alone)}}
                    if kind in (*ENDS_TRAINING, *ENDS_TASK)
                    else {}
                ),
                "unknown": len(outcomes) - len(seconds),
            }
        )
    return rows


def _spread(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"median": round(statistics.median(values), 1), "worst": round(max(values), 1)}
