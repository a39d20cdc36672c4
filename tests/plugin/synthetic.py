"""Sweeps as Airflow's database has them, written there without running them: sizes no test could train."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any

from airflow.models.dag import DagModel
from airflow.models.dagbundle import DagBundleModel
from airflow.models.dagrun import DagRun
from airflow.models.taskinstance import TaskInstance
from airflow.models.team import Team, dag_bundle_team_association_table
from airflow.models.xcom import XComModel
from sqlalchemy import create_engine, insert, select
from sqlalchemy.orm import Session

from saturn_airflow.model.plan import Assignment, Plan

TECHNIQUES = {
    1: ("single", "spill"),
    2: ("ddp", "fsdp"),
    4: ("fsdp", "tensor", "ddp"),
    8: ("pipeline", "fsdp"),
}
RUN = "manual__2026-11-20T22-00-00"


class Rows:
    """The rows of a sweep's task instances and of what they pushed."""

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep
        self.tasks: list[dict[str, Any]] = []
        self.xcoms: list[dict[str, Any]] = []

    def task(
        self,
        task_id: str,
        operator: str,
        state: str | None,
        index: int = -1,
        start: float | None = None,
        end: float | None = None,
        name: str | None = None,
        **pushed: Any,
    ) -> None:
        """Write down a task, which began and ended so many seconds after its sweep."""
        self.tasks.append(
            {
                "dag_id": self._sweep.dag_id,
                "run_id": self._sweep.run_id,
                "task_id": f"sweep.{task_id}",
                "map_index": index,
                "operator": f"{operator}Operator",
                "state": state,
                "start_date": self._at(start),
                "end_date": self._at(end),
                "try_number": 1,
                "pool": "default_pool",
                "_rendered_map_index": name,
            }
        )
        common = {"task_id": f"sweep.{task_id}", "map_index": index}
        self.xcoms.extend({**common, "key": key, "value": value} for key, value in pushed.items())

    def _at(self, seconds: float | None) -> datetime | None:
        return None if seconds is None else self._sweep.began + timedelta(seconds=seconds)


@dataclass
class Sweep:
    """A sweep to write down.

    :param at: the seconds of the plan at which it stands; None when it has ended.
    :param cancelled: whether somebody marked its DAG run as failed then.
    :param registered: what its report says of the registry; ``champion``, of the one scored anew.
    :param team: the team that its DAG's bundle belongs to.
    """

    dag_id: str
    names: Sequence[str]
    nodes: int
    devices: int
    began: datetime
    at: float | None = None
    team: str | None = None
    broken: dict[str, str] = field(default_factory=dict)
    unplanned: dict[str, str] = field(default_factory=dict)
    run_id: str = RUN
    cancelled: bool = False
    registered: dict[str, Any] | None = None
    champion: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.random = random.Random(f"{self.dag_id} {self.run_id}")
        self.plan = self._plan()
        self.made = self.began.timestamp()

    def _plan(self) -> Plan:
        free = {(n, d): 0.0 for n in range(self.nodes) for d in range(self.devices)}
        assignments = []
        for name in self.names:
            count = self.random.choice([k for k in TECHNIQUES if k <= self.devices])
            slots = [
                [(node, first + i) for i in range(count)]
                for node in range(self.nodes)
                for first in range(self.devices - count + 1)
            ]
            slot = min(slots, key=lambda slot: max(free[device] for device in slot))
            start = max(free[device] for device in slot)
            end = start + self.random.uniform(600, 5000) / count**0.5
            free.update(dict.fromkeys(slot, end))
            technique = self.random.choice(TECHNIQUES[count])
            ids = tuple(device for _, device in slot)
            assignments.append(Assignment(name, technique, count, node_name(slot[0][0]), ids, start, end))
        makespan = max(a.end for a in assignments)
        return Plan(self.dag_id, "makespan", makespan, 0.97 * makespan, 9.8, tuple(assignments))

    def write(self, url: str) -> None:
        """Write it into the database at ``url``."""
        engine = create_engine(url)
        with Session(engine) as session:
            if session.get(DagModel, self.dag_id) is None:
                self._write_dag(session)
            session.execute(insert(DagRun).values(self._run()))
            mine = DagRun.dag_id == self.dag_id, DagRun.run_id == self.run_id
            run = session.scalar(select(DagRun.id).where(*mine))
            rows = self._tasks()
            session.execute(insert(TaskInstance), rows.tasks)
            common = {"dag_run_id": run, "dag_id": self.dag_id, "run_id": self.run_id}
            session.execute(insert(XComModel), [{**common, **xcom} for xcom in rows.xcoms])
            session.commit()
        engine.dispose()

    def _write_dag(self, session: Session) -> None:
        bundle = f"bundle-of-{self.dag_id}"
        session.add(DagBundleModel(name=bundle))
        session.flush()
        if self.team:
            session.add(Team(name=self.team))
            session.flush()
            row = {"dag_bundle_name": bundle, "team_name": self.team}
            session.execute(insert(dag_bundle_team_association_table).values(row))
        session.add(DagModel(dag_id=self.dag_id, bundle_name=bundle, relative_fileloc="x.py", is_paused=True))  # type: ignore[no-untyped-call]
        session.flush()

    def _run(self) -> dict[str, Any]:
        ended = self.at is None or self.cancelled
        end = self.plan.makespan if self.at is None else self.at
        state = "failed" if self.cancelled or self.broken else "success"
        return {
            "dag_id": self.dag_id,
            "run_id": self.run_id,
            "run_type": "manual",
            "state": state if ended else "running",
            "start_date": self.began - timedelta(minutes=4),
            "end_date": self.began + timedelta(seconds=end) if ended else None,
            "run_after": self.began,
            "logical_date": self.began,
        }

    def _tasks(self) -> Rows:
        rows = Rows(self)
        ordered = sorted(self.plan.assignments, key=lambda a: (a.start, a.job))
        self._trials(rows.task)
        self._plan_task(ordered, rows.task)
        self._report(self._train(ordered, rows.task), rows.task)
        return rows

    def _trials(self, task: Any) -> None:
        link = {"_link_MlflowRunLink": "https://mlflow.example.com/#/experiments/1/runs/parent"}
        jobs = [
            {"name": name, "load_model": "shop.models:gpt2", "hparams": {"lr": 0.001}}
            for name in [*self.names, *self.unplanned]
        ]
        task(
            "trials",
            "Trials",
            "success",
            start=-200,
            end=-190,
            jobs=jobs,
            sweep={"name": "x"},
            attempt=1.0,
            **link,
        )
        for index in range(40):
            task("profile.wave_1", "Profile", "success", index, -190, -20, name=f"trial {index}")

    def _plan_task(self, ordered: Sequence[Assignment], task: Any) -> None:
        nodes = [
            {"name": node_name(n), "devices": self.devices, "kind": "h100", "queue": f"q{n}"}
            for n in range(self.nodes)
        ]
        values = {**self.plan.to_dict(), "nodes": nodes, "current_practice": 2.1 * self.plan.makespan}
        values |= {
            "compared_by": {"metric": None, "mode": "min"},
            "jobs": len(self.names) + len(self.unplanned),
        }
        values["not_planned"] = len(self.unplanned)
        task(
            "plan",
            "Plan",
            "success",
            start=-15,
            end=0,
            plan=values,
            unplanned=[{"job": job, "reason": reason} for job, reason in self.unplanned.items()],
            attempt=self.made,
            choices={a.job: self._choice(a) for a in ordered},
            profiling={"trials": 40, "known": 112, "seconds": 170.0},
            return_value=[self._entry(a) for a in ordered],
        )

    def _report(self, outcomes: list[dict[str, Any]], task: Any) -> None:
        if self.cancelled:
            task("report", "Report", "skipped")
        elif self.at is None:
            best = min((o for o in outcomes if o["status"] == "finished"), key=lambda o: o["eval_loss"])
            left_out = [{"job": j, "status": "not_planned", "reason": r} for j, r in self.unplanned.items()]
            result = {
                "best": {"job": best["job"], "metric": "eval_loss", "value": best["eval_loss"]},
                "jobs": [*outcomes, *left_out],
                "failed": [*self.broken, *self.unplanned],
                "pruned": [],
                "registered": self.registered,
                "champion": self.champion,
                "actual_seconds": max(o["ended_at"] for o in outcomes) - self.made,
                "utilisation": 0.93,
            }
            task("report", "Report", "failed" if self.broken else "success", return_value=result)
        else:
            task("report", "Report", None)

    def _train(self, ordered: Any, task: Any) -> list[dict[str, Any]]:
        """Each job takes somewhat more or less than planned, when its devices are free."""
        free: dict[tuple[str, int], float] = {}
        seen: dict[str, int] = {}
        outcomes = []
        for a in ordered:
            index = seen[a.node] = seen.get(a.node, -1) + 1
            devices = [(a.node, device) for device in a.device_ids]
            start = max(free.get(device, 0.0) for device in devices) + 1.0
            reason = self.broken.get(a.job)
            end = start + a.seconds * (0.4 if reason else self.random.uniform(0.85, 1.2))
            free.update(dict.fromkeys(devices, end))
            if self.at is not None and start > self.at:
                task(f"train.{a.node}", "Train", "skipped" if self.cancelled else None, index)
                continue
            is_over = self.at is None or end <= self.at
            share = 1.0 if is_over and not reason else 0.4 if reason else (self.at - start) / (end - start)  # type: ignore[operator]
            told = progress(a.job, self.made, share, self.made + start, a.seconds, self.run_id)
            outcome = {
                "job": a.job,
                "attempt": self.made,
                "status": "failed" if reason else "finished",
                "reason": reason,
                "started_at": self.made + start,
                "ended_at": self.made + end,
                "actual_seconds": end - start,
                "planned_seconds": a.seconds,
                "loss": told["now"]["loss"],
                "eval_loss": told["now"]["metrics"]["eval_loss"],
            }
            if not is_over and self.cancelled:
                outcome |= {"status": "stopped", "reason": "the task was stopped"}
                outcome |= {"ended_at": self.made + self.at, "actual_seconds": self.at - start}  # type: ignore[operator]
                end = self.at
            if not is_over and not self.cancelled:
                task(f"train.{a.node}", "Train", "running", index, start, name=a.job, progress=told)
                continue
            outcomes.append(outcome)
            state = "success" if outcome["status"] == "finished" else "failed"
            link = {"_link_MlflowRunLink": f"https://mlflow.example.com/#/experiments/1/runs/{index}"}
            pushed = {"outcome": outcome, "progress": told, **link}
            task(f"train.{a.node}", "Train", state, index, start, end, a.job, **pushed)
        return outcomes

    def _entry(self, a: Assignment) -> dict[str, Any]:
        return {
            **a.to_dict(),
            "name": a.job,
            "attempt": self.made,
            "parameters": {"micro_batches": 2},
            "batches": 900,
        }

    def _choice(self, a: Assignment) -> dict[str, Any]:
        options = []
        for count, techniques in TECHNIQUES.items():
            for technique in techniques:
                chosen = (technique, count) == (a.technique, a.devices)
                seconds = (
                    a.seconds * (a.devices / count) ** 0.8 * (1 if chosen else self.random.uniform(1.02, 1.5))
                )
                too_big = count == 1 and technique == "single" and not chosen
                options.append(
                    {
                        "technique": technique,
                        "devices": count,
                        "kind": "h100",
                        "seconds": None if too_big else seconds,
                        "makespan": self.plan.makespan * (1 if chosen else self.random.uniform(1, 1.08)),
                        "chosen": chosen,
                        "peak_device_bytes": 31_000_000_000 // count,
                        "source": "measured",
                        "uncertainty": 0.0,
                        "verdict": "equal in distribution: its random numbers are others",
                        "reason": "out of memory: 83.1 GiB are needed, 80.0 GiB are there"
                        if too_big
                        else None,
                    }
                )
        why = "single x 1 saves 20% device-time but ends the plan 6.1% later; nothing is faster"
        return {"why": why, "options": options, "refused": []}


def progress(
    job: str, attempt: float, share: float, began: float, seconds: float, seed: str = "", total: int = 960
) -> dict[str, Any]:
    """What a job's train task tells when it has trained ``share`` of its steps; 60 are an epoch."""
    draw = random.Random(f"{job} {seed}")
    floor, fall, noise = draw.uniform(0.4, 2.2), draw.uniform(2, 9), draw.uniform(0.01, 0.08)
    step = max(1, round(share * total))

    def loss(at: float) -> float:
        return floor + 2.5 * math.exp(-fall * at / total) + draw.gauss(0, noise)

    curve = [[round(step * (i + 1) / 48), round(loss(step * (i + 1) / 48), 4)] for i in range(min(48, step))]
    evals = [[at, round(loss(at) + 0.1 + 0.2 * (at / total) ** 3, 4)] for at in range(60, step + 1, 60)]
    metrics = {"eval_loss": evals[-1][1]} if evals else {"eval_loss": None}
    now: dict[str, Any] = {"time": began + share * seconds, "step": step, "total": total, "stops_at": None}
    now |= {"epoch": step // 60, "loss": curve[-1][1], "lr": 3e-4, "samples_per_second": 412.5}
    now |= {"eta_seconds": (1 - share) * seconds, "metrics": metrics}
    curves = {"loss": curve, "eval_loss": evals}
    return {"format": 1, "job": job, "attempt": attempt, "now": now, "curves": curves}


def node_name(number: int) -> str:
    """A node's name."""
    return f"gpu-{number:02}"


def utc_now() -> datetime:
    """Now."""
    return datetime.now(timezone.utc)
