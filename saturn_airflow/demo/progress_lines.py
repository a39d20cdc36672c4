"""Where a sweep stands, read from Airflow and from what its jobs write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from saturn_airflow.launch import event_file

#: The stages of a sweep, and the states of Airflow's tasks that have ended.
STAGES = ("trials", "profile", "plan", "train", "report")
ENDED = ("success", "failed", "upstream_failed", "skipped", "removed")


@dataclass
class JobProgress:
    """One job in training: what its last events say.

    :param batches: how many it trains for in all, as planned until its run says so itself.
    :param eta_seconds: seconds that were left when it told its last step.
    """

    name: str
    technique: str
    devices: int
    planned_seconds: float
    batches: int
    step: int = 0
    loss: float | None = None
    eta_seconds: float | None = None
    status: str = "queued"
    reason: str | None = None


@dataclass
class SweepProgress:
    """A sweep's stages, trials and jobs.

    :param stages: ``waiting``, ``running``, ``done`` or ``failed`` by stage.
    :param stage_seconds: how long each stage took that has ended.
    :param plan: the ``plan`` that the plan task pushed; None before.
    """

    stages: dict[str, str] = field(default_factory=lambda: dict.fromkeys(STAGES, "waiting"))
    stage_seconds: dict[str, float] = field(default_factory=dict)
    trials_done: int = 0
    trials_all: int = 0
    trials_running: list[str] = field(default_factory=list)
    plan: Mapping[str, Any] | None = None
    jobs: dict[str, JobProgress] = field(default_factory=dict)


def read_stages(progress: SweepProgress, tasks: list[dict[str, Any]], group: str) -> None:
    """Update stages and trials from Airflow's task instances."""
    for stage in STAGES:
        prefix = f"{group}.{stage}"
        own = [t for t in tasks if t["task_id"] == prefix or t["task_id"].startswith(prefix + ".")]
        states = [t["state"] for t in own]
        if own and all(state in ENDED for state in states):
            progress.stages[stage] = "failed" if {"failed", "upstream_failed"} & set(states) else "done"
        elif any(state in (*ENDED, "running", "queued", "up_for_retry") for state in states):
            progress.stages[stage] = "running"
        if stage == "profile":
            mapped = [t for t in own if t["map_index"] >= 0]
            progress.trials_all = len(mapped)
            progress.trials_done = sum(t["state"] in ENDED for t in mapped)
            progress.trials_running = [
                t["rendered_map_index"] or "" for t in mapped if t["state"] == "running"
            ]


def read_plan(progress: SweepProgress, plan: Mapping[str, Any], entries: list[Mapping[str, Any]]) -> None:
    """Take over the plan.

    :param entries: what the plan task returned: its jobs in the order of their start.
    """
    progress.plan = plan
    for entry in entries:
        progress.jobs[entry["name"]] = JobProgress(
            name=entry["name"],
            technique=entry["technique"],
            devices=entry["devices"],
            planned_seconds=entry["end"] - entry["start"],
            batches=entry["batches"],
        )


def read_job(job: JobProgress, folder: Path) -> None:
    """Update one job from the events that its latest run has written.

    :param folder: the job's.
    """
    runs = sorted(file.parent for file in folder.glob(f"runs/*/{event_file.NAME}"))
    for event, _ in event_file.read(runs[-1]) if runs else ():
        if event is None:
            continue
        kind = event["event"]
        if kind == "waiting":
            job.status = "waiting"
        elif kind in ("leased", "launched", "start"):
            job.status = "running"
            job.batches = event.get("total_batches") or job.batches
        elif kind == "step":
            job.status = "running"
            job.step, job.loss = event["step"], event["loss"]
            job.eta_seconds = event.get("eta_seconds")
        elif kind == "end":
            job.status, job.reason, job.eta_seconds = event["status"], event.get("reason"), None
