"""What readers of files find in whole ones."""

from __future__ import annotations

from typing import Any

from saturn_airflow import HParams, Job, Node
from saturn_airflow.launch.run_spec import RunSpec
from saturn_airflow.model.active_sweep import ActiveSweep
from saturn_airflow.model.estimates import Estimate, Trial
from saturn_airflow.model.plan import Assignment, Plan
from saturn_airflow.model.problem import Option, PlannedJob
from saturn_airflow.model.sharing import SharedJob, SharedSweep
from saturn_airflow.tracking import estimate_observations

JOB = Job("a", "shop:model", "shop:data", hparams=HParams(batches=3), model_args={"layers": 2})


SPEC = RunSpec(job=JOB, technique="ddp", folder="f", node="n", slots=2, devices=1, kind="cpu").to_dict()


PLAN = Plan("p", "makespan", 5.0, 4.0, 0.1, (Assignment("a", "ddp", 1, "n", (0,), 0.0, 5.0),)).to_dict()


WAYS = {"technique": "ddp", "devices": 1, "seconds": {"cpu": 5.0}}


ARRIVALS: dict[str, Any] = {
    "nodes": [{"name": "n", "devices": 2, "kind": "cpu"}],
    "sweeps": [{"name": "s", "arrives": 0, "jobs": [{"name": "a", "strategies": [WAYS]}]}],
    "shares": {"team": 1.0},
}


MEASURED = {"parameters": {}, "seconds_per_batch": 0.5, "setup_seconds": 1.0, "batches": 5}


RESULT = {**MEASURED, "ready_seconds": 1.0}


OF_A_TRIAL = [
    {"event": "leased", "devices": ["0"], "technique": "ddp", "time": 1.0},
    {"event": "launched", "ranks": 1, "time": 1.0},
    {"event": "warning", "message": "others use its memory", "occupied": True, "time": 1.0},
    {"event": "measured", **MEASURED, "time": 1.0},
    {"event": "guard", "seconds": 1.0, "verdict": "ok", "time": 1.0},
    {"event": "broken", "job": "b", "reason": "why", "time": 1.0},
    {"event": "end", "status": "finished", "reason": None, "traceback": "", "result": RESULT, "time": 1.0},
]


TRIAL = Trial(job=JOB, technique="ddp", devices=1, node="n", covers=("a", "b"), fingerprint="f")


PROBLEM = {"format": 1, "nodes": ARRIVALS["nodes"], "jobs": ARRIVALS["sweeps"][0]["jobs"]}


FIELDS = {"load_model": "shop:model", "hparams": {"lr": 0.1, "batches": 3}}


MANIFEST = {
    "format": 3,
    "step": 8,
    "definition": {"fields": FIELDS},
    "files": {"w.safetensors": {"bytes": 4}},
}


LEDGER = ActiveSweep(
    dag_id="d",
    run_id="r",
    folder="sweeps/d/r/sweep",
    made=1.0,
    nodes=(Node("n", 2, "a100"),),
    sweep=SharedSweep(
        "d/r/sweep",
        (SharedJob(PlannedJob("a", (Option("ddp", 2, {"a100": 5.0}, 1.0),), ("n",))),),
        arrived=1.0,
        alone=5.0,
    ),
)


SEEN = {
    "format": estimate_observations.FORMAT,
    "versions": {"torch": "2"},
    "source": "measured",
    "job": "a",
    "time": 1e12,
    "estimate": Estimate(
        fingerprint="f", technique="ddp", devices=2, kind="cpu", seconds_per_batch=0.5, batches=3
    ).to_dict(),
}
