"""The papers' claim, realised: `python benchmarks/paper.py`.

Saturn's paper (Nagrecha and Kumar, VLDB 2024) finds 39 to 49 % lower model-selection time than current
practice. Here the twelve jobs of `benchmarks/instances/txt-*` and `img-*` run on nodes of their sizes. The
devices are emulated: a technique sleeps as long as training would take by the instance's law; where a number
of devices is missing there, the model does not fit (`benchmarks/paper/techniques/emulated.py`). Seconds are
scaled by one factor for all, so that the least that any plan can take is `--seconds`. All else is real:
Airflow, Celery, device locks, trials, plans.

Ways to run them, all with jobs that pay their starts, seconds from the first start to the end of the last:

- `current_practice`: each job on a whole node, under the technique that is fastest there, one after another.
- `fixed_width`: a queue with one number of devices for all (more where a job does not fit), the one that
  takes least of 2, 4 and 8 by the laws: one knows only afterwards which.
- `one_device`: a queue with one device for each job, or as few as it fits on.
- `ray_tune`: trials of Ray Tune with the devices of the better of these two; all nodes are one to it.
- `realised`: Saturn, from the plan to the last job's end; `planned` is what its plan said, `first_night`
  all from the trigger to the end, trials (`profile_seconds`) and report included; `next_night` is the sweep
  again.

The first three run with Saturn's processes and device locks, without Airflow and MLflow: a favour to them.
`bound` is what no plan can beat (proven by the planner). `busy` is the share of the devices' time that jobs
had them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from machine import describe
from sweep import ray_python

from saturn_airflow.demo.airflow import Airflow
from saturn_airflow.deployment.local import LocalCluster
from saturn_airflow.deployment.processes import end_on_signals
from saturn_airflow.model.problem import Problem
from saturn_airflow.planning import solve

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "benchmarks" / "paper"
sys.path.append(str(HERE))
from queues import TECHNIQUES, Emulated, Fastest, expected, run  # noqa: E402 - of that folder

CASES = ("txt-1x8", "txt-2x8", "txt-8-4-4", "img-1x8", "img-2x8", "img-8-4-4")
DAG = "emulated_sweep"


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=CASES, action="append", help="only this one")
    parser.add_argument("--seconds", type=float, default=120.0, help="least of a sweep (%(default)s)")
    parser.add_argument("--out", type=Path, help="file for the results; what it has of other cases stays")
    parser.add_argument("--laws", action="store_true", help="only say what the laws give; run nothing")
    args = parser.parse_args()
    if args.laws:
        print(json.dumps({case: by_laws(case, args.seconds) for case in args.case or CASES}, indent=1))
        return
    end_on_signals()
    results: dict[str, Any] = {"devices": "emulated", "cases": {}}
    if args.out and args.out.exists():
        results = json.loads(args.out.read_text())
    for case in args.case or CASES:
        load = os.getloadavg()[0]
        with tempfile.TemporaryDirectory(prefix="saturn-paper-", ignore_cleanup_errors=True) as folder:
            found = measure(case, args.seconds, Path(folder))
        results["cases"][case] = {**found, "machine": describe(), "load_average_before": round(load, 2)}
        print(json.dumps({case: results["cases"][case]}, indent=1), flush=True)
        if args.out:
            args.out.write_text(json.dumps(results, indent=1) + "\n")


def measure(case: str, least: float, folder: Path) -> dict[str, Any]:
    """All ways to run a case."""
    problem, jobs, scale, _ = scaled(case, least)
    nodes = [node["devices"] for node in problem["nodes"]]
    found = {"bound": least, **queues(jobs, nodes, folder), **saturn(jobs, problem["nodes"], folder)}
    practice = found["current_practice"]
    return {
        **found,
        "scale": scale,
        "less_than_current_practice": round(1 - found["realised"] / practice, 3),
        "bound_less_than_current_practice": round(1 - least / practice, 3),
        "realised_over_planned": round(found["realised"] / found["planned"], 3),
    }


def by_laws(case: str, least: float) -> dict[str, float]:
    """Seconds of the best plan found and of the queues, where nothing but training takes time, and by which
    share a plan, and the best that there may be, is shorter than current practice."""
    problem, jobs, _, planned = scaled(case, least)
    nodes = [node["devices"] for node in problem["nodes"]]
    queues = {"current_practice": None, "fixed_width": fixed_width(jobs, nodes), "one_device": 1}
    found = {"bound": least, "plan": planned}
    found |= {way: expected(jobs, wanted, nodes) for way, wanted in queues.items()}
    less = {way: round(1 - found[way] / found["current_practice"], 3) for way in ("plan", "bound")}
    return {way: round(seconds, 1) for way, seconds in found.items()} | {
        f"{way}_less_than_current_practice": share for way, share in less.items()
    }


def scaled(case: str, least: float) -> tuple[dict[str, Any], list[Emulated], float, float]:
    """An instance, its jobs scaled to a bound of ``least`` seconds, the factor, and the plan's seconds."""
    problem = json.loads((ROOT / "benchmarks" / "instances" / f"{case}.json").read_text())
    plan = solve(Problem.from_dict(problem), time_limit=20)
    scale = least / plan.lower_bound
    return problem, [emulated(job, scale) for job in problem["jobs"]], scale, plan.makespan * scale


def fixed_width(jobs: Sequence[Emulated], nodes: Sequence[int]) -> int:
    """The number of devices for all jobs that takes least by the laws."""
    return min((2, 4, 8), key=lambda wanted: expected(jobs, wanted, nodes))


def emulated(job: Mapping[str, Any], scale: float) -> Emulated:
    """A job of an instance with its seconds scaled."""
    fastest: dict[int, Fastest] = {}
    for strategy in job["strategies"]:
        (seconds,) = set(strategy["seconds"].values())  # these cases have one kind of device
        this = Fastest(seconds * scale, strategy["technique"])
        fastest[strategy["devices"]] = min(this, fastest.get(strategy["devices"], this))
    return Emulated(job["name"], fastest)


def queues(jobs: Sequence[Emulated], nodes: Sequence[int], folder: Path) -> dict[str, Any]:
    """What people do without a planner: seconds of each way. They sleep side by side, but for Ray Tune's."""
    wide = fixed_width(jobs, nodes)
    ways = {"current_practice": None, "fixed_width": wide, "one_device": 1}
    with ThreadPoolExecutor(len(ways)) as pool:
        started = {way: pool.submit(run, jobs, wanted, nodes, folder / way) for way, wanted in ways.items()}
    took = {way: round(each.result(), 1) for way, each in started.items()}
    best = min((wide, 1), key=lambda wanted: expected(jobs, wanted, nodes))
    return {**took, "width": wide, "ray_tune": ray_tune(jobs, best, sum(nodes), folder), "ray_width": best}


def ray_tune(jobs: Sequence[Emulated], wanted: int, devices: int, folder: Path) -> float | None:
    """Seconds of Ray Tune; None where Ray can't be had."""
    if (python := ray_python()) is None:
        return None
    asked, result = folder / "ray.json", folder / "ray-result.json"
    widths = [job.width(wanted) for job in jobs]
    rows = [
        {"name": job.name, "devices": width, "seconds": job.fastest[width].seconds}
        for job, width in zip(jobs, widths, strict=True)
    ]
    asked.write_text(json.dumps(rows))
    with (folder / "ray.log").open("w") as log:
        command = [str(python), str(HERE / "ray_queue.py"), str(devices), str(asked), str(result)]
        environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
        subprocess.run(command, env=environment, stdout=log, stderr=log, check=True)
    found = json.loads(result.read_text())
    return round(max(job["ended"] for job in found["jobs"]) - found["began"], 1)


def saturn(jobs: Sequence[Emulated], nodes: Sequence[Mapping[str, Any]], folder: Path) -> dict[str, Any]:
    """The sweep through Airflow, twice."""
    case = folder / "case.json"
    case.write_text(json.dumps([job.job().to_dict() for job in jobs]))
    cluster = LocalCluster(
        folder / "cluster",
        compose_of([node["name"] for node in nodes], folder),
        HERE,
        variables={
            "SATURN_NODES": ", ".join(f"{node['name']}:{node['devices']}:cpu" for node in nodes),
            "NODE_CONCURRENCY": str(max(node["devices"] for node in nodes) + 4),
        },
        environment={"PAPER_CASE": str(case), "AIRFLOW__SATURN__TECHNIQUES_FOLDER": TECHNIQUES},
    )
    with cluster:
        airflow = Airflow(cluster.airflow_url, cluster.login)
        airflow.wait_for_dag(DAG, 300)
        first, again = night(cluster, airflow), night(cluster, airflow)
    return {
        "planned": round(first["planned_seconds"], 1),
        "realised": round(first["actual_seconds"], 1),
        "busy": round(first["utilisation"], 3),
        "first_night": round(first["wall"], 1),
        "profile_seconds": round(first["profile_seconds"], 1),
        "next_night": {
            "planned": round(again["planned_seconds"], 1),
            "realised": round(again["actual_seconds"], 1),
            "busy": round(again["utilisation"], 3),
            "wall": round(again["wall"], 1),
        },
    }


def night(cluster: LocalCluster, airflow: Airflow) -> dict[str, Any]:
    """The report of a sweep that ran, and its seconds from the trigger to its end."""
    run_id = airflow.trigger(DAG)
    while (state := airflow.state(DAG, run_id)) not in ("success", "failed"):
        cluster.check()
        time.sleep(3)
    if state == "failed":
        raise SystemExit(f"the sweep failed: {airflow.tasks(DAG, run_id)}")
    run_of = airflow.get(f"/dags/{DAG}/dagRuns/{run_id}")
    began, ended = (datetime.fromisoformat(run_of[name]) for name in ("queued_at", "end_date"))
    return {**airflow.xcom(DAG, run_id, "sweep.report"), "wall": (ended - began).total_seconds()}


def compose_of(nodes: Sequence[str], folder: Path) -> Path:
    """The project's compose file with a worker for each of these nodes."""
    path = shutil.copytree(ROOT / "docker", folder / "docker") / "compose.yaml"
    data = yaml.safe_load(path.read_text())
    pattern = json.dumps(data["services"].pop("gpu-a"))
    del data["services"]["gpu-b"]
    data["services"] |= {node: json.loads(pattern.replace("gpu-a", node)) for node in nodes}
    path.write_text(yaml.safe_dump(data))
    return path


if __name__ == "__main__":
    main()
