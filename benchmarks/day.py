"""A day of a deployment in an hour: `python benchmarks/day.py [--sweeps 40] [--jobs 50] [--out FILE]`.

The cluster of benchmarks/overhead.py, whose jobs sleep for a second. One sweep after another: the first
measures, the others know. Prints for each sweep how long it took from the plan's end to the first lease, how
many tasks the scheduler started a second where it was busiest, and the CPU-seconds of each service a job; at
the end how large the databases have grown, and what services hold of memory. A sweep that fails ends it.
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
from overhead import DEVICES, HERE, NODES, ROOT, events, seconds_of, services, spread, state_of
from sqlalchemy import create_engine, text

from saturn_airflow.demo.airflow import Airflow
from saturn_airflow.deployment.local import LocalCluster
from saturn_airflow.deployment.processes import end_on_signals

#: Seconds over which starts of tasks are counted.
WINDOW = 10.0
TABLES = ("xcom", "task_instance", "task_instance_history", "rendered_task_instance_fields", "log")


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweeps", type=int, default=40)
    parser.add_argument("--jobs", type=int, default=50, help="jobs of each sweep")
    parser.add_argument("--seconds", type=float, default=1.0, help="that each job sleeps on one device")
    parser.add_argument("--out", type=Path, help="file for the results")
    args = parser.parse_args()
    end_on_signals()
    with tempfile.TemporaryDirectory(prefix="saturn-day-", ignore_cleanup_errors=True) as folder:
        results = measure(args.sweeps, args.jobs, args.seconds, Path(folder))
    print(json.dumps(results, indent=2))
    if args.out:
        args.out.write_text(json.dumps(results, indent=2) + "\n")


def measure(sweeps: int, jobs: int, seconds: float, folder: Path) -> dict[str, Any]:
    """All sweeps on one cluster."""
    sleepers = [(f"job-{number:03}", seconds / 4, 4) for number in range(jobs)]
    cluster = LocalCluster(
        folder / "cluster",
        ROOT / "docker" / "compose.yaml",
        HERE,
        variables={"SATURN_NODES": ", ".join(f"{node}:{DEVICES}:cpu" for node in NODES)},
        environment={
            "SLEEPERS": json.dumps(sleepers),
            "AIRFLOW__SATURN__TECHNIQUES_FOLDER": str(HERE / "techniques"),
        },
    )
    load = os.getloadavg()[0]
    with cluster:
        airflow = Airflow(cluster.airflow_url, cluster.login)
        airflow.wait_for_dag("sleepers")
        before, rows = sizes(cluster), []
        for _ in range(sweeps):
            rows.append(sweep(cluster, airflow, jobs))
            print(json.dumps(rows[-1]), flush=True)
        after = sizes(cluster)
    return {
        "sweeps": sweeps,
        "jobs_of_a_sweep": jobs,
        "plan_to_first_lease_seconds": spread([row["plan_to_first_lease_seconds"] for row in rows]),
        "tasks_started_a_second": spread([row["tasks_started_a_second"] for row in rows]),
        "seconds_of_the_second_and_the_last_sweep": [rows[1 % len(rows)]["seconds"], rows[-1]["seconds"]],
        "kib_a_job": {
            name: round((after[name] - before[name]) / 1024 / (sweeps * jobs), 2) for name in after
        },
        "rows": rows,
        "load_average_before": round(load, 2),
        "machine": describe(),
    }


def sweep(cluster: LocalCluster, airflow: Airflow, jobs: int) -> dict[str, Any]:
    """One sweep, from its trigger to its end."""
    began, used = time.time(), services(cluster)
    run_id = airflow.trigger("sleepers")
    while (state := state_of(airflow, "sleepers", run_id)) not in ("success", "failed"):
        cluster.check()
        time.sleep(2)
    if state == "failed":
        raise SystemExit(f"the sweep {run_id} failed; see {cluster.state}")
    took, now = time.time() - began, services(cluster)
    tasks = airflow.tasks("sleepers", run_id)
    planned = next(seconds_of(task["end_date"]) for task in tasks if task["task_id"] == "sweep.plan")
    runs = (cluster.home / "sweeps" / "sleepers" / run_id / "sweep").glob("*/runs/*")
    leased = [event["time"] for run in runs for event in events(run) if event["event"] == "leased"]
    starts = sorted(seconds_of(task["start_date"]) for task in tasks if task["start_date"])
    busiest = max(sum(start <= other < start + WINDOW for other in starts) for start in starts)
    return {
        "seconds": round(took, 1),
        "plan_to_first_lease_seconds": round(min(at for at in leased if at > planned - 1) - planned, 2),
        "tasks": len(tasks),
        "tasks_started_a_second": round(busiest / WINDOW, 2),
        "cpu_seconds_a_job": {
            name: round((cpu - used.get(name, (0.0, 0.0))[0]) / jobs, 2) for name, (cpu, _) in now.items()
        },
        "mib": {name: round(memory / 2**20) for name, (_, memory) in now.items()},
    }


def sizes(cluster: LocalCluster) -> dict[str, int]:
    """Bytes of both databases, and of the tables of Airflow's that grow with jobs, with their indices."""
    urls = {
        "airflow": cluster.environment("scheduler")["AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"],
        "mlflow": cluster.environment("mlflow")["MLFLOW_BACKEND_STORE_URI"],
    }
    found = {}
    for name, url in urls.items():
        engine = create_engine(url)
        with engine.connect() as connection:
            found[name] = connection.scalar(text("SELECT pg_database_size(current_database())"))
            for table in TABLES if name == "airflow" else ():
                size = text("SELECT pg_total_relation_size(to_regclass(:table))")
                found[f"airflow.{table}"] = connection.scalar(size, {"table": table}) or 0
        engine.dispose()
    return found


if __name__ == "__main__":
    main()
