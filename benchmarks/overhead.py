"""What a sweep costs beside its training: `python benchmarks/overhead.py`.

On the deployment of docker/compose.yaml as local processes (Celery, Redis, Postgres, MLflow), two nodes of
four CPU devices (`many`: eight). The jobs sleep (benchmarks/overhead/techniques/asleep.py): how long is
known, and needs no cores, which a machine of few cores would lack for that many devices.

- `handover`: 40 jobs of a few seconds. From one job's end to the next job's first batch on the same device.
- `makespan`: 16 jobs of about a minute. Actual over planned seconds of the sweep.
- `many`: 200 jobs of a few seconds on eight devices a node.
- In each: the share of the time that devices are leased in which batches run, and the CPU-seconds a job of
  each service. Runs (supervisors and ranks) are what is left of the machine's, with all others that use it.
- While jobs wait for devices: how many do on each node, and the memory of one.
- `empty_tasks`: what as many mapped tasks of Airflow cost the same services in the same run that sleep as
  long, as many at once as there are devices (benchmarks/overhead/empty_tasks.py), and what the process of one
  takes; `services_over_empty_tasks` is what a job of the sweep costs the services over that.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import statistics
import tempfile
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import psutil
from machine import describe

from saturn_airflow.demo.airflow import Airflow
from saturn_airflow.deployment.local import LocalCluster
from saturn_airflow.deployment.processes import end_on_signals
from saturn_airflow.launch import event_file, runs

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "benchmarks" / "overhead"
NODES, DEVICES = ("gpu-a", "gpu-b"), 4
SEED = 20261121
BATCH = 0.25


def jobs(count: int, shortest: int, longest: int) -> list[tuple[str, int]]:
    """Names and batches of jobs whose batches take :data:`BATCH` seconds on one device."""
    chance = random.Random(SEED)
    return [(f"job-{i:02}", chance.randint(shortest * 4, longest * 4)) for i in range(count)]


def measure(name: str, sleepers: list[tuple[str, int]], state: Path, devices: int) -> dict[str, Any]:
    """Run one sweep on a cluster of its own, of nodes that have so many devices."""
    cluster = LocalCluster(
        state,
        ROOT / "docker" / "compose.yaml",
        HERE,
        variables={"SATURN_NODES": ", ".join(f"{node}:{devices}:cpu" for node in NODES)},
        environment={
            "SLEEPERS": json.dumps([(name, BATCH, batches) for name, batches in sleepers]),
            "EMPTY_TASKS": json.dumps(
                {node: [BATCH * n for _, n in sleepers[i :: len(NODES)]] for i, node in enumerate(NODES)}
            ),
            "EMPTY_TASKS_AT_ONCE": str(devices),
            "AIRFLOW__SATURN__TECHNIQUES_FOLDER": str(HERE / "techniques"),
        },
    )
    with cluster:
        airflow = Airflow(cluster.airflow_url, cluster.login)
        airflow.wait_for_dag("sleepers")
        before, machine_before = services(cluster), busy_seconds()
        run_id = airflow.trigger("sleepers")
        folder = cluster.home / "sweeps" / "sleepers" / run_id / "sweep"
        state_now, watched = watch(cluster, airflow, run_id, folder)
        machine, after = busy_seconds() - machine_before, services(cluster)
        tasks = airflow.tasks("sleepers", run_id)
        plan = airflow.xcom("sleepers", run_id, "sweep.plan", "plan")
        result = airflow.xcom("sleepers", run_id, "sweep.report")
        if state_now != "success" or result is None:
            failed = [f"{t['task_id']}[{t['map_index']}]" for t in tasks if t["state"] == "failed"]
            raise SystemExit(f"{name}: the sweep failed: {failed}; see {cluster.state}")
        found, held = gaps(folder), leased(folder)
        empty = empty_tasks(cluster, airflow)
    cpu = {name: (seconds - before[name][0]) / len(sleepers) for name, (seconds, _) in after.items()}
    over_empty = sum(cpu.values()) / sum(empty["cpu_seconds_a_task"].values())
    cpu["runs_and_others"] = machine / len(sleepers) - sum(cpu.values())
    stages = {
        stage: span
        for stage in ("trials", "profile", "plan", "train", "report")
        if (span := stage_seconds(tasks, f"sweep.{stage}")) is not None
    }
    return {
        "jobs": len(sleepers),
        "devices_per_node": devices,
        "seconds_on_one_device": spread([BATCH * batches for _, batches in sleepers]),
        "handover_seconds": found,
        "planned_seconds": round(plan["makespan"], 2),
        "actual_seconds": round(result["actual_seconds"], 2),
        "actual_over_planned": round(result["actual_seconds"] / plan["makespan"], 3),
        "stage_seconds": stages,
        **held,
        "cpu_seconds_a_job": {name: round(seconds, 2) for name, seconds in cpu.items() if seconds >= 0.005},
        "services_over_empty_tasks": round(over_empty, 2),
        "empty_tasks": empty,
        **watched,
    }


def empty_tasks(cluster: LocalCluster, airflow: Airflow) -> dict[str, Any]:
    """What a mapped task that only sleeps takes: of each service CPU-seconds, and MB of its process."""
    airflow.wait_for_dag("empty_tasks")
    before, began = services(cluster), time.monotonic()
    run_id = airflow.trigger("empty_tasks")
    while (state := state_of(airflow, "empty_tasks", run_id)) != "success":
        if state == "failed":
            raise SystemExit(f"tasks that only sleep failed; see {cluster.state}")
        cluster.check()
        time.sleep(2)
    after, took = services(cluster), time.monotonic() - began
    count = len(airflow.tasks("empty_tasks", run_id))
    of = f"/dags/empty_tasks/dagRuns/{run_id}/taskInstances"
    sizes = [
        airflow.get(f"{of}/{node}/xcomEntries/return_value", map_index=0, stringify=False)["value"]
        for node in NODES
    ]
    cpu = {name: (seconds - before[name][0]) / count for name, (seconds, _) in after.items()}
    return {
        "tasks": count,
        "seconds": round(took, 1),
        "cpu_seconds_a_task": {name: round(seconds, 3) for name, seconds in cpu.items()},
        "memory_of_a_task_mb": {
            kind: round(statistics.mean(size[kind] for size in sizes), 1) for kind in sizes[0]
        },
    }


def watch(cluster: LocalCluster, airflow: Airflow, run_id: str, folder: Path) -> tuple[str, dict[str, Any]]:
    """How the sweep ended, and what its tasks took of the machine until then."""
    waiting: Counter[str] = Counter()
    memory: list[dict[str, float]] = []
    load: list[float] = []
    psutil.cpu_percent()
    while (state := state_of(airflow, "sleepers", run_id)) not in ("success", "failed"):
        cluster.check()
        processes = train_processes(folder)
        for node in NODES:
            here = [p for p in processes if p["node"] == node]
            waiting[f"{node} processes"] = max(waiting[f"{node} processes"], len(here))
            waiting[f"{node} waiting"] = max(waiting[f"{node} waiting"], sum(p["waits"] for p in here))
        if folder.exists() and any(p["waits"] for p in processes):
            load.append(psutil.cpu_percent())
            if len(memory) < 12:  # looking costs time that the sweep would have
                memory += [sizes for p in processes if p["waits"] and (sizes := memory_of(p["pid"]))]
        time.sleep(2)
    kinds = memory[0] if memory else ()
    sizes = {kind: round(statistics.median(sizes[kind] for sizes in memory), 1) for kind in kinds}
    return state, {
        "most_train_processes": dict(waiting),
        "cores_busy_percent": round(statistics.mean(load), 1) if load else None,
        "memory_of_a_waiting_task_mb": sizes or None,
    }


def state_of(airflow: Airflow, dag: str, run_id: str) -> str:
    """A DAG run's state; unknown while the API server is too busy to say."""
    try:
        return airflow.state(dag, run_id)
    except httpx.TransportError:
        return "unknown"


def events(run: Path) -> list[dict[str, Any]]:
    """What a run said so far."""
    path = run / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def gaps(folder: Path) -> dict[str, Any]:
    """From the end of each job to what came next on its devices: the lease, and the first batch.

    Told apart by whether the next run had begun, and stood in line, when the devices became free.
    """
    spans: dict[str, list[tuple[float, ...]]] = {}
    for run in folder.glob("*/runs/*"):
        said = {event["event"]: event for event in events(run)}
        if "slept" in said:
            node = json.loads((run / "spec.json").read_text())["node"]
            names = ("leased", "start", "slept", "end", event_file.FORMAT_EVENT)
            times = tuple(said[name]["time"] for name in names)
            for device in said["leased"]["devices"]:
                spans.setdefault(f"{node} {device}", []).append(times)
    leases, starts, late = [], [], []
    for ordered in map(sorted, spans.values()):
        for before, after in pairwise(ordered):
            leases.append(after[0] - before[3])
            starts.append(after[1] - before[2])
            if after[4] > before[3]:
                late.append(starts[-1])
    in_line = sorted(starts)
    for seconds in late:
        in_line.remove(seconds)
    return {
        "handovers": len(starts),
        "last_batch_to_first_batch": spread(starts),
        "where_the_next_was_in_line": spread(in_line),
        "where_its_task_had_not_begun": {"handovers": len(late), **spread(late)},
        "end_to_lease": spread(leases),
    }


def leased(folder: Path) -> dict[str, Any]:
    """Of the time that devices were leased for training the share in which batches ran, and what came before
    and after."""
    before, after, trained, held = [], [], 0.0, 0.0
    for run in folder.glob("*/runs/*"):
        said = {event["event"]: event for event in events(run)}
        if "slept" in said and json.loads((run / "spec.json").read_text())["mode"] == "train":
            times = [said[name]["time"] for name in ("leased", "start", "slept", "end")]
            devices = len(said["leased"]["devices"])
            trained += devices * (times[2] - times[1])
            held += devices * (times[3] - times[0])
            before.append(times[1] - times[0])
            after.append(times[3] - times[2])
    return {
        "share_of_leases_with_batches": round(trained / held, 3),
        "lease_to_first_batch": spread(before),
        "last_batch_to_end": spread(after),
    }


def busy_seconds() -> float:
    """CPU-seconds that the machine's cores have worked."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)


def services(cluster: LocalCluster) -> dict[str, tuple[float, float]]:
    """CPU-seconds of each service so far, with those of what it started, and bytes that its processes hold,
    shared pages counted once. Runs are no part of the workers that started them."""
    found: dict[str, tuple[float, float]] = {}
    for note in cluster.processes.logs.glob("*.pid"):
        cpu = memory = 0.0
        with contextlib.suppress(psutil.Error, ValueError):
            service = psutil.Process(int(note.read_text().split()[0]))
            for process in (service, *service.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    cpu += sum(process.cpu_times()[:4])
                    memory += process.memory_full_info().pss
            found[note.stem] = cpu, memory
    return found


def spread(seconds: list[float]) -> dict[str, float]:
    """Median, 95th percentile and maximum."""
    if not seconds:
        return {}
    ordered = sorted(seconds)
    p95 = ordered[min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))]
    return {
        "median": round(statistics.median(ordered), 2),
        "p95": round(p95, 2),
        "max": round(ordered[-1], 2),
    }


def stage_seconds(tasks: list[dict[str, Any]], prefix: str) -> float | None:
    """From the first start to the last end of a stage's tasks."""
    own = [t for t in tasks if re.match(rf"{re.escape(prefix)}(\.|$)", t["task_id"]) and t["duration"]]
    if not own:
        return None
    ends = [seconds_of(t["end_date"]) for t in own]
    return round(max(ends) - min(seconds_of(t["start_date"]) for t in own), 1)


def seconds_of(text: str) -> float:
    """Seconds since the epoch of Airflow's timestamps."""
    from datetime import datetime

    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def train_processes(folder: Path) -> list[dict[str, Any]]:
    """The supervisors of the sweep's training: their node, and whether they wait for devices."""
    found = []
    for job in folder.glob("*/runs"):
        for run in runs.all_of(job.parent):
            # One that is just starting has not written its process id yet.
            pid = (run.folder / "alive").read_text().strip() if run.is_alive() else ""
            if run.spec.mode == "train" and pid:
                said = {event["event"] for event in events(run.folder)}
                waits = "waiting" in said and "leased" not in said
                found.append({"pid": int(pid), "node": run.spec.node, "waits": waits})
    return found


def memory_of(supervisor: int) -> dict[str, float] | None:
    """Megabytes of one waiting task: Airflow's and Saturn's processes, whole (RSS), by share (PSS), and what
    nobody shares (USS), which is what one more that waits takes of the node."""
    try:
        own = psutil.Process(supervisor)
        groups = {
            "task": [psutil.Process(starter_of(supervisor))],
            "supervisor": [own, *own.children(recursive=True)],
        }
        sizes = {}
        for name, processes in groups.items():
            infos = [process.memory_full_info() for process in processes]
            sizes[f"{name}_rss"] = sum(info.rss for info in infos) / 2**20
            sizes[f"{name}_pss"] = sum(info.pss for info in infos) / 2**20
            sizes[f"{name}_uss"] = sum(info.uss for info in infos) / 2**20
    except (psutil.Error, OSError, ValueError):
        return None
    for kind in ("rss", "pss", "uss"):
        sizes[f"all_{kind}"] = sum(sizes[f"{name}_{kind}"] for name in groups)
    return sizes


def starter_of(supervisor: int) -> int:
    """The process that a supervisor watches: it holds a file of it (``pidfd_open``).

    :raises ValueError: when it watches none.
    """
    for file in Path(f"/proc/{supervisor}/fdinfo").iterdir():
        for line in file.read_text().splitlines():
            if line.startswith("Pid:"):
                return int(line.split()[1])
    raise ValueError(f"process {supervisor} watches none")


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="file for the results; what it has of other cases stays")
    parser.add_argument("--case", choices=("handover", "makespan", "many"), action="append")
    parser.add_argument("--jobs", type=int, default=40, help="how many short jobs (%(default)s)")
    parser.add_argument("--state", type=Path, help="folder for the clusters (a temporary one)")
    args = parser.parse_args()
    end_on_signals()
    cases = {
        "handover": (jobs(args.jobs, 4, 12), DEVICES),
        "makespan": (jobs(16, 45, 75), DEVICES),
        "many": (jobs(200, 4, 12), 2 * DEVICES),
    }
    results: dict[str, Any] = {"nodes": len(NODES)}
    if args.out and args.out.exists():
        results = json.loads(args.out.read_text())
    with tempfile.TemporaryDirectory(prefix="saturn-overhead-", ignore_cleanup_errors=True) as folder:
        for case in args.case or cases:
            sleepers, devices = cases[case]
            # Figures taken while others use the cores say little of Saturn.
            results[case] = {"machine": describe(), "load_average_before": round(os.getloadavg()[0], 2)}
            results[case] |= measure(case, sleepers, (args.state or Path(folder)) / case, devices)
            print(json.dumps({case: results[case]}, indent=2), flush=True)
    if args.out:
        args.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
