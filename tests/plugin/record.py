"""A DAG run put together by hand, as the pages read it."""

from __future__ import annotations

import json
from typing import Any

from saturn_airflow.model.plan import Assignment, Plan
from saturn_airflow.plugin.overview import sweep_page
from saturn_airflow.plugin.queries import Record, Task, Told

MADE = 1000.0


NOW = 1100.0


NODES = [{"name": "a", "devices": 2, "kind": "cpu"}, {"name": "idle", "devices": 4, "kind": "cpu"}]


class Run:
    """A DAG run put together by hand."""

    def __init__(self, state: str = "running") -> None:
        self.state = state
        self.tasks: list[Task] = []
        self.values: dict[tuple[str, int, str], Any] = {}
        self.progress: dict[tuple[str, int], Told] = {}
        self.task("trials", "trials", "success")

    def task(
        self,
        task_id: Any,
        stage: Any,
        state: Any,
        index: int = -1,
        start: Any = None,
        end: Any = None,
        name: Any = None,
        **pushed: Any,
    ) -> None:
        self.tasks.append(Task(f"sweep.{task_id}", index, stage, state, start, end, 1, name))
        self.values.update({(f"sweep.{task_id}", index, key): value for key, value in pushed.items()})

    def plan(self, *assignments: Any, made: Any = MADE, prefix: str = "", **more: Any) -> None:
        makespan = max((a.end for a in assignments), default=1.0)
        plan = Plan("x", "makespan", makespan, 0.9 * makespan, 1.0, tuple(assignments))
        values = {**plan.to_dict(), "nodes": NODES, "current_practice": 3 * makespan}
        self.task(f"{prefix}plan", "plan", "success", plan=values, attempt=made, **more)

    def train(
        self, index: Any, state: Any, job: Any = None, prefix: str = "", start: Any = None, **outcome: Any
    ) -> None:
        pushed = {"outcome": {"job": job, "attempt": MADE, **outcome}} if outcome else {}
        self.task(f"{prefix}train", "train", state, index, start, name=job, **pushed)

    def told(self, index: Any, prefix: str = "", attempt: Any = MADE, **now: Any) -> None:
        self.progress[f"sweep.{prefix}train", index] = Told(attempt, now)

    def page(self, now: Any = NOW) -> Any:
        tasks = tuple(self.tasks)
        record = Record("dag", "run", self.state, 900.0, None, tasks, self.values, self.progress)
        found = sweep_page(record, "sweep", now)
        json.dumps(found, allow_nan=False)
        return found

    def job(self, name: Any, now: Any = NOW) -> Any:
        return next(job for job in self.page(now)["jobs"] if job["name"] == name)


def on(job: Any, start: Any, end: Any, devices: Any = (0,), technique: str = "single") -> Any:
    return Assignment(job, technique, len(devices), "a", tuple(devices), start, end)


def finished(start: Any, end: Any) -> Any:
    return {
        "status": "finished",
        "started_at": start,
        "ended_at": end,
        "actual_seconds": end - start,
        "loss": 0.5,
    }
