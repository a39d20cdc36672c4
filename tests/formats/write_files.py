"""Writes the files of one version, for later versions to read: run with that version's code on the path.

    git archive VERSION | tar -x -C OLD
    PYTHONPATH=OLD python tests/formats/write_files.py tests/formats/files/VERSION

What a job's folder holds after training that was stopped (``job``) and a sweep's records for MLflow that were
not sent, with what its tasks handed to each other (``xcoms.json``).
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from saturn_airflow import Cluster, HParams, Job, Node, tracking
from saturn_airflow.deciding.entering import entries
from saturn_airflow.launch import runs
from saturn_airflow.model.estimates import Estimate, Trial
from saturn_airflow.model.plan import Assignment, Plan
from saturn_airflow.operators.wave_tasks import listed
from saturn_airflow.profiling.fingerprints import fingerprint
from saturn_airflow.profiling.knowledge import Knowledge
from saturn_airflow.profiling.options import by_key

#: Where they are written first: the paths in them are the same on every machine.
PLACE = Path("/tmp/saturn-files")
USERLAND = PLACE / "userland"
JOB = Job(
    "small",
    load_model="small_jobs:linear",
    load_dataloader="small_jobs:noise",
    loss_function="small_jobs:squared",
    data_args={"samples": 64},
    hparams=HParams(batches=12, lr=0.01),
)
NODE = Node("local", 1, kind="cpu")
NOWHERE = "http://127.0.0.1:9"
ATTEMPT = 100.0


def spec(folder: Path, **settings: Any) -> runs.RunSpec:
    """What a run of the job is asked for."""
    return runs.RunSpec(
        job=JOB,
        technique="single",
        folder=str(folder),
        node=NODE.name,
        slots=1,
        devices=1,
        device_ids=(0,),
        kind="cpu",
        priority=(ATTEMPT, 0),
        leases_folder=str(folder.parent / "leases"),
        path=(str(USERLAND),),
        **settings,
    )


def write(to: Path) -> None:
    """Write the files."""
    job_folder = to / "job"
    run = runs.start(spec(job_folder, batch_count=5))
    tags = {"saturn.sweep": "nightly/mon/sweep"}
    sweep = tracking.open_sweep(NOWHERE, "nightly", "sweep", tags, {"jobs": 1}, to, patience=0.0)
    record = tracking.open_job(NOWHERE, sweep, JOB.name, tracking.job_params(JOB), {}, job_folder)
    for event in run.events():
        record.follow(event)
    record.log_bytes(b"bytes", "some.txt")
    record.leave()
    estimate = Estimate(
        fingerprint=fingerprint(JOB),
        technique="single",
        devices=1,
        kind="cpu",
        seconds_per_batch=0.01,
        batches=5,
    )
    tracking.estimate_store.record(NOWHERE, [estimate], to, {"torch": "2.13"}, patience=0.0)
    (to / "xcoms.json").write_text(json.dumps(xcoms(estimate, sweep.to_dict()), indent=1))
    for leftover in (
        "lock",
        "follower",
        *(f"runs/0001/{name}" for name in ("output.log", "host", "followed")),
    ):
        (job_folder / leftover).unlink(missing_ok=True)
    (job_folder / "runs" / "0001" / "alive").write_text("")
    shutil.rmtree(to / "leases", ignore_errors=True)


def xcoms(estimate: Estimate, sweep: dict[str, Any]) -> dict[str, Any]:
    """What the tasks of a sweep hand to each other."""
    cluster = Cluster(NODE)
    knowledge = Knowledge.of([JOB], cluster, None, [])
    plan = Plan(
        "nightly", "makespan", 9.0, 9.0, 1.0, (Assignment("small", "single", 1, "local", (0,), 0.0, 9.0),)
    )
    made = entries(plan, {"small": JOB}, by_key(estimate), cluster, ATTEMPT)
    trial = Trial(
        job=JOB, technique="single", devices=1, node="local", covers=("small",), fingerprint=fingerprint(JOB)
    )
    return {
        "jobs": [JOB.to_dict()],
        "sweep": sweep,
        "trials": [{**trial.to_dict(), "attempt": ATTEMPT, "made": ATTEMPT, "position": 0}],
        "listed": listed([], knowledge, ATTEMPT),
        "known": [estimate.to_dict()],
        "estimates": [
            {"attempt": ATTEMPT, "estimate": estimate.to_dict()},
            {"attempt": ATTEMPT, "jobs": ["broken"], "error": "it raised"},
        ],
        "entries": [entry.to_dict() for entry in made],
        "plan": {**plan.to_dict(), **cluster.to_dict(), "current_practice": 9.0},
        "outcome": {"attempt": ATTEMPT, "job": "small", "status": "finished", "reason": None, "loss": 0.5},
    }


if __name__ == "__main__":
    shutil.rmtree(PLACE, ignore_errors=True)
    (PLACE / "sweep").mkdir(parents=True)
    USERLAND.symlink_to(Path(__file__).parents[1].absolute() / "training" / "userland")
    write(PLACE / "sweep")
    shutil.copytree(PLACE / "sweep", sys.argv[1], dirs_exist_ok=True)
