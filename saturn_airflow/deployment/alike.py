"""Whether nodes have the clock, the shared folder and the MLflow of the machine that plans and reports, and
those that have the same GPUs the same locks."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from saturn_airflow.deployment import survey as surveys
from saturn_airflow.deployment.findings import Deployment, Finding, Question
from saturn_airflow.model.folders import slug

#: Clocks that differ by less than so many seconds tell the same time.
_SAME_TIME = 2.0
#: GPUs that a message names.
_SHOWN = 2


def check_alike(deployment: Deployment) -> Iterator[Finding]:
    """Nodes have this machine's time, write to its folder of checkpoints, record in its MLflow, and lock
    devices that several of them have in one folder."""
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
    yield from _locks(deployment.nodes)


def _locks(nodes: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """Nodes with the same GPUs, as two workers of one machine have, that lock them in different folders."""
    # Earlier versions did not say which folder it is.
    known = {name: said for name, said in nodes.items() if "file" in said.get("leases", {})}
    for (name, said), (other, theirs) in itertools.combinations(known.items(), 2):
        shared = [uuid for uuid in said.get("gpu_uuids", ()) if uuid in theirs.get("gpu_uuids", ())]
        if shared and said["leases"]["file"] != theirs["leases"]["file"]:
            text = (
                f"{name} and {other} share GPUs ({', '.join(shared[:_SHOWN])}), and lock them in different "
                f"folders, {said['leases']['folder']} and {theirs['leases']['folder']}: two jobs may have "
                "one GPU at once"
            )
            fix = (
                "set [saturn] leases_folder to one folder for both workers (in containers one volume), or "
                "let each see GPUs of its own (CUDA_VISIBLE_DEVICES)"
            )
            yield Finding("leases", "problem", text, fix)


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
