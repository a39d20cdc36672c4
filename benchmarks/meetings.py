"""Sweeps that meet in other ways than those of two_sweeps.py: `python benchmarks/meetings.py`.

On the deployment of docker/compose.yaml as local processes (Celery, Redis, Postgres, MLflow), two nodes of
two CPU devices:

- ``elsewhere``: a sweep of six jobs of 60 s with ``Rounds(off_by=0.1)`` has both nodes when a sweep of higher
  priority takes all of gpu-a for 90 s, of whose kind a short one ran before, so that it is planned without
  trials. Which of its jobs trained elsewhere than first planned, in how many rounds, when it ended by its
  first plan and in truth, how many steps were trained twice, and how long the other took to be planned;
- ``deadline``: a sweep of four jobs of 45 s on gpu-b with a deadline in 170 s, when one of higher priority
  with two jobs of 90 s comes. What the plan of that one said it breaks, how long before the deadline the
  author of the first was told, and when it was done.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import describe
from two_sweeps import ROOT, losses_of, runs_of, start, wait_for

from saturn_airflow.demo.airflow import Airflow
from saturn_airflow.deployment.local import LocalCluster
from saturn_airflow.deployment.processes import end_on_signals


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("elsewhere", "deadline"), help="this row alone")
    parser.add_argument("--out", type=Path, help="file for the results")
    args = parser.parse_args()
    end_on_signals()
    load, rows = os.getloadavg()[0], {}
    with tempfile.TemporaryDirectory(prefix="saturn-meetings-", ignore_cleanup_errors=True) as folder:
        cluster = LocalCluster(
            Path(folder),
            ROOT / "docker" / "compose.yaml",
            ROOT / "benchmarks" / "soak",
            variables={"SATURN_NODES": "gpu-a:2:cpu, gpu-b:2:cpu", "NODE_CONCURRENCY": "8"},
        )
        with cluster:
            airflow = Airflow(cluster.airflow_url, cluster.login)
            for name, meet in (("deadline", deadline), ("elsewhere", elsewhere)):
                if args.only in (None, name):
                    rows[name] = meet(cluster, airflow)
                    print(json.dumps({name: rows[name]}), flush=True)
    results = {"machine": {**describe(), "load_average_before": round(load, 1)}, "rows": rows}
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


def begin(cluster: LocalCluster, airflow: Airflow, first: str, jobs: int, second: str) -> dict[str, float]:
    """Let ``second`` meet ``first``, once so many of its jobs have trained some steps; how long each took."""
    for dag in (first, second):
        airflow.wait_for_dag(dag)
        airflow.send("PATCH", f"/dags/{dag}", {"is_paused": False})
    began = {first: start(airflow, first, first)}
    while sum(steps > 20 for steps in map(len, losses_of(cluster, first).values())) < jobs:
        cluster.check()
        time.sleep(1)
    began[second] = start(airflow, second, first)
    took = wait_for(cluster, airflow, began, first)
    return {name: round(seconds, 1) for name, seconds in took.items()}


def elsewhere(cluster: LocalCluster, airflow: Airflow) -> dict[str, Any]:
    """What waits goes to the other node."""
    run = "rounds"
    airflow.wait_for_dag("known")
    airflow.send("PATCH", "/dags/known", {"is_paused": False})
    wait_for(cluster, airflow, {"known": start(airflow, "known", run)}, run)
    took = begin(cluster, airflow, "rounds", 4, "wide")
    first = airflow.xcom("rounds", run, "sweep.round_1.plan")
    planned = {entry["job"]["name"]: entry["node"] for entry in first}
    made = airflow.xcom("rounds", run, "sweep.round_1.plan", "attempt")
    report = airflow.xcom("rounds", run, "sweep.report")
    came = airflow.xcom("wide", run, "sweep.trials", "started")
    planned_wide = airflow.xcom("wide", run, "sweep.plan", "attempt")
    steps = [e for one in runs_of(cluster, run) for e in one.so_far() if e["event"] == "step"]
    return {
        "seconds": took,
        "rounds": report["rounds"],
        "trained_elsewhere": sorted(
            job["job"] for job in report["jobs"] if job["node"] != planned[job["job"]]
        ),
        "planned_end": round(airflow.xcom("rounds", run, "sweep.round_1.plan", "plan")["makespan"], 1),
        "end": round(max(job["ended_at"] for job in report["jobs"]) - made, 1),
        "steps_trained_twice": len(steps) - sum(map(len, losses_of(cluster, run).values())),
        "wide_planned_in": round(planned_wide - came, 1),
        "statuses": sorted({job["status"] for job in report["jobs"]}),
    }


def deadline(cluster: LocalCluster, airflow: Airflow) -> dict[str, Any]:
    """Who breaks it is told, and whose is broken."""
    run = "due"
    took = begin(cluster, airflow, "due", 2, "breaking")
    report = airflow.xcom("due", run, "sweep.report")
    file = cluster.home / f"told-{run}.jsonl"
    told = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    at, made = report["deadline"]["at"], airflow.xcom("breaking", run, "sweep.plan", "attempt")
    breaks = airflow.xcom("breaking", run, "sweep.plan", "plan").get("breaks", [])
    return {
        "seconds": took,
        "breaker_was_told": [{k: round(v - at, 1) for k, v in one.items()} for one in breaks],
        "told_seconds_before_deadline": [round(at - one["time"], 1) for one in told],
        "told_seconds_after_the_plan_that_breaks": [round(one["time"] - made, 1) for one in told],
        "expected_late": [round(one["expected"] - at, 1) for one in told if one.get("expected")],
        "late_seconds": round(report["deadline"]["late_seconds"], 1),
    }


if __name__ == "__main__":
    main()
