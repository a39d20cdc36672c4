"""Whether nodes have the clock, the shared folder and the MLflow of the machine that plans and reports."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from saturn_airflow.deployment import survey as surveys
from saturn_airflow.deployment.findings import Deployment, Finding, Question
from saturn_airflow.model.folders import slug

#: Clocks that differ by less than so many seconds tell the same time.
_SAME_TIME = 2.0


def check_alike(deployment: Deployment) -> Iterator[Finding]:
    """Nodes have this machine's time, write to its folder of checkpoints, and record in its MLflow."""
    from saturn_airflow.operators.context import home

    seen = _marks(home())
    for name, said in deployment.nodes.items():
        if deployment.question is None or "error" in said:
            continue
        yield from _clock(deployment.question, name, said)
        mark = said["home"]["mark"]
        if mark and seen is not None and seen.get(slug(said["name"])) != mark:
            text = f"this machine does not see in {home()} what {name} writes to {said['home']['folder']}"
            fix = (
                "mount one shared folder on all machines, and set [saturn] home to it on each: plans and "
                "reports, which are made here, read there how far jobs are"
            )
            yield Finding("storage", "problem", text, fix)
        yield from _mlflow(name, said)


def _marks(folder: Path) -> dict[str, str] | None:
    """The marks that are seen in ``folder``; None where this user may not look there."""
    try:
        os.listdir(folder)
    except FileNotFoundError:
        return {}
    except OSError:
        return None
    return surveys.marks(folder)


def _clock(question: Question, name: str, said: Mapping[str, Any]) -> Iterator[Finding]:
    there = said.get("time")  # earlier versions did not say
    if there is None:
        return
    off = max(0.0, there - question.answered) or min(0.0, there - question.asked)
    if abs(off) > _SAME_TIME:
        text = f"{name}: its clock is {abs(off):.0f} s {'ahead of' if off > 0 else 'behind'} this machine's"
        fix = (
            "set the clocks of all machines by NTP (chrony, systemd-timesyncd): rounds, deadlines, turns and "
            "reports compare moments that several of them tell"
        )
        yield Finding("clocks", "problem", text, fix)


def _mlflow(name: str, said: Mapping[str, Any]) -> Iterator[Finding]:
    here = os.environ.get("MLFLOW_TRACKING_URI", "").rstrip("/")
    if not here.startswith("http") or said.get("has_mlflow_uri", True):
        return
    # The address of a connection nodes have, too.
    if surveys.addresses().get("MLflow") == f"{here}/health":
        text = f"{name}: MLFLOW_TRACKING_URI is not set there, and its jobs' runs go into a file of its own"
        fix = "set it for the worker as it is here, or add the connection mlflow_default to Airflow"
        yield Finding("mlflow", "problem", text, fix)
