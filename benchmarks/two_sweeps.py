"""A short urgent sweep that meets a long one: `python benchmarks/two_sweeps.py`.

On the deployment of docker/compose.yaml as local processes (Celery, Redis, Postgres, MLflow), two nodes of
two CPU devices. The long sweep has a job of 150 s on each device when the short one comes, of two jobs of
10 s. Once the long one's jobs may give way at a checkpoint (``preempt=True``), once they may not. For each:
seconds from the short sweep's trigger to its end, and from the long one's, and what the long jobs' own
events say: how often they gave way, and how many steps were trained twice; of all devices' time the share in
which one was idle while a job of either sweep waited that fitted (``idle_share``); and when each sweep was to
end by its plan: the short one's is made among the other's jobs, the long one's before anybody could know of
the short one. The losses of both runs must be the same in every step.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from machine import describe
from stays import idle_share, shared, stays_of

from saturn_airflow.demo.airflow import Airflow
from saturn_airflow.deployment.local import LocalCluster
from saturn_airflow.deployment.processes import end_on_signals
from saturn_airflow.launch import runs

ROOT = Path(__file__).resolve().parents[1]
LONG, SHORT = "research", "urgent"
DEVICES = {"gpu-a": 2, "gpu-b": 2}
Losses = dict[str, dict[int, float]]


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="file for the results")
    args = parser.parse_args()
    end_on_signals()
    rows, seen = {}, []
    for preempt in (True, False):
        row, losses = meeting(preempt)
        rows["preempt" if preempt else "wait"] = row
        seen.append(losses)
    results = {"machine": describe(), "rows": rows, "losses_are_the_same": seen[0] == seen[1]}
    print(json.dumps(results, indent=1))
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


def meeting(preempt: bool) -> tuple[dict[str, Any], Losses]:
    """Let the two sweeps meet; what came of it, and each step's loss by job."""
    with tempfile.TemporaryDirectory(prefix="saturn-two-sweeps-", ignore_cleanup_errors=True) as folder:
        cluster = LocalCluster(
            Path(folder),
            ROOT / "docker" / "compose.yaml",
            ROOT / "benchmarks" / "soak",
            variables={
                "SATURN_NODES": ", ".join(f"{node}:{count}:cpu" for node, count in DEVICES.items()),
                "NODE_CONCURRENCY": "6",
            },
            environment={"TWO_SWEEPS_PREEMPT": str(int(preempt))},
        )
        with cluster:
            airflow = Airflow(cluster.airflow_url, cluster.login)
            for dag in (LONG, SHORT):
                airflow.wait_for_dag(dag)
                airflow.send("PATCH", f"/dags/{dag}", {"is_paused": False})
            # What is known of both before they meet: only training is to wait.
            wait_for(cluster, airflow, {SHORT: start(airflow, SHORT, "alone")}, "alone")
            began = {LONG: start(airflow, LONG, "met")}
            while sum(steps > 100 for steps in map(len, losses_of(cluster, "met").values())) < 4:
                cluster.check()
                time.sleep(1)
            began[SHORT] = start(airflow, SHORT, "met")
            took = wait_for(cluster, airflow, began, "met")
            events = [event for run in runs_of(cluster, "met") for event in run.so_far()]
            steps = [event for event in events if event["event"] == "step"]
            losses = losses_of(cluster, "met")
            stays = [stay for folder in folders_of(cluster, "met") for stay in stays_of(folder, 0.0)]
            row = {
                "short_seconds": round(took[SHORT], 1),
                "long_seconds": round(took[LONG], 1),
                "gave_way": sum(event["event"] == "gave_way" for event in events),
                "steps_trained_twice": len(steps) - sum(map(len, losses.values())),
                "idle_share": round(idle_share(stays, DEVICES, lambda stay: stay.asked), 4),
                "shared": shared(stays),
                **{f"{name}_end": end_of(airflow, dag) for name, dag in (("short", SHORT), ("long", LONG))},
            }
    print(json.dumps({"preempt": preempt, **row}), flush=True)
    return row, losses


def end_of(airflow: Airflow, dag: str) -> dict[str, float]:
    """Seconds from a sweep's plan to its jobs' end: as they were planned, and as they were."""
    made = airflow.xcom(dag, "met", "sweep.plan", "attempt")
    planned = airflow.xcom(dag, "met", "sweep.plan", "plan")["makespan"]
    jobs = airflow.xcom(dag, "met", "sweep.report")["jobs"]
    actual = max(job["ended_at"] for job in jobs) - made
    return {"planned": round(planned, 1), "actual": round(actual, 1)}


def start(airflow: Airflow, dag: str, run_id: str) -> float:
    """Start a sweep; when, on this machine's clock."""
    body = {"logical_date": datetime.now(timezone.utc).isoformat(), "dag_run_id": run_id}
    airflow.send("POST", f"/dags/{dag}/dagRuns", body)
    return time.monotonic()


def wait_for(
    cluster: LocalCluster, airflow: Airflow, began: dict[str, float], run_id: str
) -> dict[str, float]:
    """How long each sweep took from its start."""
    took: dict[str, float] = {}
    while len(took) < len(began):
        cluster.check()
        for dag in began.keys() - took.keys():
            state = airflow.state(dag, run_id)
            assert state != "failed", f"{dag} failed"
            if state == "success":
                took[dag] = time.monotonic() - began[dag]
        time.sleep(1)
    return took


def runs_of(cluster: LocalCluster, run_id: str) -> list[runs.Run]:
    """All runs of all training jobs."""
    return [run for folder in folders_of(cluster, run_id) for run in runs.all_of(folder)]


def folders_of(cluster: LocalCluster, run_id: str) -> list[Path]:
    """Of all training jobs."""
    return [path.parent for path in sorted(cluster.home.glob(f"sweeps/*/{run_id}/sweep/*/runs"))]


def losses_of(cluster: LocalCluster, run_id: str) -> Losses:
    """Each step's loss, by job."""
    found: Losses = {}
    for run in runs_of(cluster, run_id):
        steps = (event for event in run.so_far() if event["event"] == "step")
        found.setdefault(run.spec.job.name, {}).update({event["step"]: event["loss"] for event in steps})
    return found


if __name__ == "__main__":
    main()
