"""Many sweeps at once on one node: `python benchmarks/crowds.py`.

On the deployment of docker/compose.yaml as local processes (Celery, Redis, Postgres, MLflow), one node of six
CPU devices whose worker runs eight tasks at once, and a plain worker of four. Two, then five, then ten sweeps
are started together, each of three jobs that sleep for longer than `[scheduler] task_queued_timeout`, after
which Airflow here fails a task that is still in a worker's queue. With `--no-pools` the deployment has none.

For each crowd: how many sweeps succeeded, how many tasks there were and how many of them needed a second try,
the longest that a task was in a queue, and the longest that one waited for a slot before (seconds).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import httpx
from machine import describe

from saturn_airflow.demo.airflow import Airflow
from saturn_airflow.deployment.local import LocalCluster
from saturn_airflow.deployment.processes import end_on_signals

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "benchmarks" / "overhead"
DAG = "sleepers"
SLOTS, DEVICES, JOBS, JOB_SECONDS, QUEUED_TIMEOUT = 8, 6, 3, 40, 25


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sweeps", type=int, nargs="+", default=[2, 5, 10], help="how many at once")
    parser.add_argument("--no-pools", action="store_true", help="as where `saturn pools` was never run")
    parser.add_argument("--out", type=Path, help="file for the results")
    args = parser.parse_args()
    end_on_signals()
    temporary = tempfile.TemporaryDirectory(prefix="saturn-crowds-", ignore_cleanup_errors=True)
    with temporary as folder, deployment(Path(folder)) as cluster:
        if args.no_pools:
            (cluster.home / "pools.json").unlink()
        airflow = Airflow(cluster.airflow_url, cluster.login)
        airflow.wait_for_dag(DAG)
        rows = [crowd(cluster, airflow, count) for count in args.sweeps]
    results = {
        "machine": describe(),
        "slots": SLOTS,
        "devices": DEVICES,
        "jobs_of_a_sweep": JOBS,
        "job_seconds": JOB_SECONDS,
        "task_queued_timeout": QUEUED_TIMEOUT,
        "pools": not args.no_pools,
        "rows": rows,
    }
    print(json.dumps(results, indent=1))
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


def deployment(folder: Path) -> LocalCluster:
    """The cluster with its one node."""
    batches = JOB_SECONDS * 4
    return LocalCluster(
        folder,
        ROOT / "docker" / "compose.yaml",
        HERE,
        variables={
            "SATURN_NODES": f"gpu-a:{DEVICES}:cpu",
            "NODE_CONCURRENCY": str(SLOTS),
            "WORKER_CONCURRENCY": "4",
        },
        environment={
            "SLEEPERS": json.dumps([(f"job-{i}", 0.25, batches) for i in range(JOBS)]),
            "AIRFLOW__SATURN__TECHNIQUES_FOLDER": str(HERE / "techniques"),
            "AIRFLOW__SCHEDULER__TASK_QUEUED_TIMEOUT": str(QUEUED_TIMEOUT),
            "AIRFLOW__SCHEDULER__TASK_QUEUED_TIMEOUT_CHECK_INTERVAL": "5",
            "AIRFLOW__SCHEDULER__NUM_STUCK_IN_QUEUED_RETRIES": "0",
        },
    )


def crowd(cluster: LocalCluster, airflow: Airflow, count: int) -> dict[str, Any]:
    """Start ``count`` sweeps together and wait for all."""
    began, now = time.monotonic(), datetime.now(timezone.utc)
    ids = [f"crowd-{count}-{i}" for i in range(count)]
    for i, run_id in enumerate(ids):
        body = {"logical_date": (now + timedelta(milliseconds=i)).isoformat(), "dag_run_id": run_id}
        airflow.send("POST", f"/dags/{DAG}/dagRuns", body)
    airflow.send("PATCH", f"/dags/{DAG}", {"is_paused": False})
    states: dict[str, str] = {}
    while len(states) < count:
        cluster.check()
        for run_id in ids:
            try:
                state = airflow.state(DAG, run_id)
            except httpx.TimeoutException:
                continue
            if state in ("success", "failed"):
                states[run_id] = state
        time.sleep(2)
    seconds = time.monotonic() - began
    tasks = [t for run_id in ids for t in airflow.tasks(DAG, run_id) if t["start_date"] and t["queued_when"]]
    row = {
        "sweeps": count,
        "succeeded": sum(state == "success" for state in states.values()),
        "seconds": round(seconds),
        "tasks": len(tasks),
        "second_tries": sum(t["try_number"] > 1 for t in tasks),
        "failed_tasks": sum(t["state"] == "failed" for t in tasks),
        "longest_in_a_queue": round(max(_between(t, "queued_when", "start_date") for t in tasks)),
        "longest_wait_for_a_slot": round(max(_between(t, "scheduled_when", "queued_when") for t in tasks)),
    }
    print(json.dumps(row), flush=True)
    return row


def _between(task: dict[str, Any], first: str, last: str) -> float:
    begin, end = (datetime.fromisoformat(task[name]) for name in (first, last))
    return (end - begin).total_seconds()


if __name__ == "__main__":
    main()
