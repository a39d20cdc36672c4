"""A sweep of real jobs, against what people do without a planner: `python benchmarks/sweep.py`.

Twelve jobs of two model families (benchmarks/sweep/measured_jobs.py) on two CPU slots of this machine, each a
core, one way after another and all of it again:

- `whole_node`: current practice. Each job on both slots under the technique that is fastest there, one after
  another. What is fastest there is measured before, for one job of each family, and costs this way nothing.
- `process_queue`: one slot for each job, in the order they are written, the next when a slot is free; each is
  a new process of Python with a plain training loop (benchmarks/sweep/plain_loop.py).
- `queue`: the same queue of Saturn's own trainings, which are forked from a process that has torch already.
- `ray_tune`: the same jobs as trials of Ray Tune with one CPU each, in an environment of their own with Ray's
  defaults and a plain training loop (benchmarks/sweep/ray_trials.py). Where Ray can't be installed, this way
  is left out.
- `ray_reused`: the same with `reuse_actors=True`: Ray's processes train one job after another.
- `mapped_queue`: the queue as a DAG, a mapped task for each job (benchmarks/sweep/mapped_queue.py).
- `first_night`: the sweep through Airflow where nothing is known of the jobs: trials first, then the plan.
- `next_night`: the same sweep again, which knows the speeds of the night before.

`whole_node` and the first two queues go without Airflow and MLflow: who works that way needs neither, and
does not share these two cores with them. The last three have the services of `saturn demo`
(one machine, SQLite) beside them on the same two cores, which a deployment has on a machine of their own; the
nights record to MLflow besides. So `mapped_queue` tells what Airflow costs here, and `queue` what all costs.

`makespan_seconds` is from when the first job has its devices to the end of the last one, the same for all;
`wall_seconds` is from the command (or the trigger) to the end of everything: trials, planning and report
included.

`SWEEP_LONGER=3` in the environment makes all jobs three times as long.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

from machine import describe

from saturn_airflow import Job
from saturn_airflow.demo.airflow import Airflow
from saturn_airflow.demo.demo_services import Services
from saturn_airflow.deployment.processes import end_on_signals
from saturn_airflow.launch import past_runs, runs
from saturn_airflow.model.estimates import Estimate
from saturn_airflow.profiling.knowledge import Knowledge
from saturn_airflow.profiling.measure import measure
from saturn_airflow.profiling.trials import trials_of

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "benchmarks" / "sweep"
sys.path.append(str(HERE))
from measured_jobs import CLUSTER, JOBS, LONGER, NODE  # noqa: E402 - a DAG imports it, too

PEERS = ("whole_node", "process_queue", "queue", "ray_tune", "ray_reused", "mapped_queue")
NIGHTS = ("first_night", "next_night")
RAY = ("ray[tune]==2.60.0", "torch==2.13.0", "transformers", "scikit-learn")
RAY_HOME = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "saturn-airflow" / "ray"

Row = dict[str, Any]


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--again", type=int, default=2, metavar="N", help="how often all is run (%(default)s)"
    )
    parser.add_argument("--way", choices=(*PEERS, "nights"), action="append", help="only this one")
    parser.add_argument("--state", type=Path, help="keep what the ways write in this folder")
    parser.add_argument("--out", type=Path, help="file for the results")
    parser.add_argument("--more", action="store_true", help="keep what the file has, and add to it")
    args = parser.parse_args()
    end_on_signals()
    ways = args.way or [*PEERS, "nights"]
    rows: list[Row] = json.loads(args.out.read_text())["rows"] if args.more else []
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="saturn-sweep-", ignore_cleanup_errors=True) as temporary:
        state = (args.state or Path(temporary)).resolve()
        dags = dags_folder(state)
        fastest = fastest_on_the_node(state, dags) if "whole_node" in ways else {}
        for number in range(args.again):
            for way in ways:
                folder = state / f"{way}-{number}"
                folder.mkdir()
                wide = fastest if way == "whole_node" else {}
                specs = [spec_of(job, wide.get(job.load_model), folder, dags) for job in JOBS]
                match way:
                    case "nights":
                        found = nights(folder, dags)
                    case "mapped_queue":
                        found = [mapped_queue(specs, folder, dags)]
                    case "process_queue":
                        found = [process_queue(folder, dags)]
                    case "ray_tune" | "ray_reused":
                        found = ray_tune(way, folder, dags)
                    case _:
                        found = [direct(way, specs, 1 if wide else NODE.devices)]
                for row in found:
                    rows.append(row)
                    print(json.dumps(row), flush=True)
    results = {
        "machine": {**describe(), "load_average_before": load},
        "jobs": len(JOBS),
        "times_as_long": LONGER,
        "slots": NODE.devices,
        **compared(rows),
        "rows": rows,
    }
    print(json.dumps({key: value for key, value in results.items() if key != "rows"}, indent=2))
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


def dags_folder(state: Path) -> Path:
    """The DAG and its jobs, beside the models and data of the example DAGs."""
    dags = state / "dags"
    shutil.copytree(ROOT / "dags" / "shop", dags / "shop", ignore=shutil.ignore_patterns("techniques"))
    for name in ("measured_jobs.py", "measured_sweep.py", "mapped_queue.py"):
        shutil.copy(HERE / name, dags)
    return dags


def fastest_on_the_node(state: Path, dags: Path) -> dict[str, Estimate]:
    """The fastest strategy on all devices of the node, by the jobs' family: a job in its middle tells."""
    families = dict.fromkeys(job.load_model for job in JOBS)
    members = [[job for job in JOBS if job.load_model == family] for family in families]
    middle = [family[len(family) // 2] for family in members]
    knowledge = Knowledge.of(middle, CLUSTER, None)
    wide = [key for key in knowledge.grid if key.devices == NODE.devices]
    fastest: dict[str, Estimate] = {}
    for number, trial in enumerate(trials_of(wide, knowledge.strategies)):
        found = measure(
            trial,
            NODE,
            folder=state / "trials" / str(number),
            leases_folder=str(state / "leases"),
            path=(str(dags),),
        )
        best = fastest.get(trial.job.load_model)
        if found.works and (best is None or found.seconds_per_batch < best.seconds_per_batch):
            fastest[trial.job.load_model] = found
    return fastest


def spec_of(job: Job, strategy: Estimate | None, folder: Path, dags: Path) -> runs.RunSpec:
    """How a way without Airflow runs a job: under ``strategy``, or on one device."""
    return runs.RunSpec(
        job=job,
        technique=strategy.technique if strategy else "single",
        parameters=strategy.parameters if strategy else {},
        devices=strategy.devices if strategy else 1,
        folder=str(folder / job.name),
        node=NODE.name,
        kind=NODE.kind,
        slots=NODE.devices,
        leases_folder=str(folder / "leases"),
        path=(str(dags),),
    )


def direct(way: str, specs: Sequence[runs.RunSpec], at_once: int) -> Row:
    """Train jobs in their order, so many at once, each from its start to its end."""
    began = time.time()
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(lambda spec: runs.start(spec).wait(), specs))
    return row_of(way, [outcome_of(spec) for spec in specs], time.time() - began)


def process_queue(folder: Path, dags: Path) -> Row:
    """Train jobs in their order, as many at once as there are slots, each in a new process of Python."""
    environment = {**os.environ, "PYTHONPATH": str(dags)}

    def train(job: Job) -> dict[str, Any]:
        place, asked, result = (folder / job.name / name for name in ("", "job.json", "result.json"))
        place.mkdir()
        asked.write_text(json.dumps(job.to_dict()))
        started = time.time()
        command = [sys.executable, str(HERE / "plain_loop.py"), str(asked), str(result)]
        subprocess.run(command, env=environment, cwd=place, check=True)
        when = {"started_at": started, "ended_at": time.time()}
        return {"job": job.name, "technique": "plain", "devices": 1, **when, **json.loads(result.read_text())}

    began = time.time()
    with ThreadPoolExecutor(NODE.devices) as pool:
        outcomes = list(pool.map(train, JOBS))
    return row_of("process_queue", outcomes, time.time() - began)


def mapped_queue(specs: Sequence[runs.RunSpec], folder: Path, dags: Path) -> Row:
    """The queue as tasks of Airflow."""
    listed = folder / "specs.json"
    listed.write_text(json.dumps([spec.to_dict() for spec in specs]))
    with Services(folder / "state", dags, {"MAPPED_QUEUE": str(listed)}) as services:
        _, wall = run_of(Airflow(services.airflow_url), "mapped_queue")
    return row_of("mapped_queue", [outcome_of(spec) for spec in specs], wall)


def outcome_of(spec: runs.RunSpec) -> dict[str, Any]:
    """What became of a job that was trained without a sweep."""
    end = runs.all_of(spec.folder)[-1].end
    if end is None or end["status"] != "finished":
        raise SystemExit(f"{spec.job.name} was not trained: {end}")
    strategy = {"technique": spec.technique, "devices": spec.devices}
    return {"job": spec.job.name, **strategy, **end["result"], **past_runs.time_on_devices(spec.folder)}


def nights(folder: Path, dags: Path) -> list[Row]:
    """The sweep twice, on an Airflow and an MLflow of its own."""
    # Without the example technique of dags/shop, which trains otherwise.
    with Services(folder, dags, {"AIRFLOW__SATURN__TECHNIQUES_FOLDER": ""}) as services:
        airflow = Airflow(services.airflow_url)
        return [night(name, airflow) for name in NIGHTS]


def night(name: str, airflow: Airflow) -> Row:
    """One run of the sweep."""
    run_id, wall = run_of(airflow, "measured_sweep")
    result = airflow.xcom("measured_sweep", run_id, "sweep.report")
    kept = ("planned_seconds", "trials", "profile_seconds", "utilisation", "estimate_error_median")
    return row_of(name, result["jobs"], wall) | {key: result.get(key) for key in kept}


def run_of(airflow: Airflow, dag_id: str) -> tuple[str, float]:
    """A new run of a DAG, once it has succeeded, and its seconds from the trigger to its end."""
    airflow.wait_for_dag(dag_id, 300)
    run_id = airflow.trigger(dag_id)
    while airflow.state(dag_id, run_id) not in ("success", "failed"):
        time.sleep(5)  # every question takes a share of the cores
    run = airflow.get(f"/dags/{dag_id}/dagRuns/{run_id}")
    if run["state"] != "success":
        raise SystemExit(f"{dag_id} failed: {airflow.tasks(dag_id, run_id)}")
    began, ended = (datetime.fromisoformat(run[name]) for name in ("queued_at", "end_date"))
    return run_id, (ended - began).total_seconds()


def row_of(way: str, outcomes: Sequence[dict[str, Any]], wall: float) -> Row:
    """One way's figures, from what became of each job."""
    first = min(outcome["started_at"] for outcome in outcomes)
    return {
        "way": way,
        "makespan_seconds": round(max(outcome["ended_at"] for outcome in outcomes) - first, 1),
        "wall_seconds": round(wall, 1),
        "jobs": {
            o["job"]: {
                "strategy": f"{o['technique']} x {o['devices']}",
                "from": round(o["started_at"] - first, 1),
                "to": round(o["ended_at"] - first, 1),
                "seconds_per_batch": round(o["seconds_per_batch"], 4),
                "eval_loss": round(o["eval_loss"], 4),
            }
            for o in outcomes
        },
    }


def ray_python() -> Path | None:
    """Python of an environment with Ray, made where it is not there; None where Ray can't be had."""
    python = RAY_HOME / "bin" / "python"
    if not (RAY_HOME / "made").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(RAY_HOME)], check=True)
        constraints = str(ROOT / "constraints.txt")
        install = [str(python), "-m", "pip", "install", "--quiet", "--constraint", constraints, *RAY]
        if subprocess.run(install, check=False).returncode:
            print("Ray can't be installed here: it is left out", file=sys.stderr)
            return None
        (RAY_HOME / "made").touch()
    return python


def ray_tune(way: str, folder: Path, dags: Path) -> list[Row]:
    """The jobs as trials of Ray Tune, where Ray can be had."""
    if (python := ray_python()) is None:
        return []
    jobs, result = folder / "jobs.json", folder / "result.json"
    jobs.write_text(json.dumps([job.to_dict() for job in JOBS]))
    environment = {**os.environ, "PYTHONPATH": str(dags), "RAY_USAGE_STATS_ENABLED": "0"}
    began = time.time()
    with (folder / "output.log").open("w") as log:
        command = [str(python), str(HERE / "ray_trials.py"), str(jobs), str(result)]
        command += ["--reuse-actors"] if way == "ray_reused" else []
        subprocess.run(command, env=environment, stdout=log, stderr=log, check=True)
    outcomes = json.loads(result.read_text())
    return [row_of(way, outcomes, time.time() - began)]


def compared(rows: Sequence[Row]) -> Row:
    """Medians of each way, and what the nights take of the peers' seconds."""
    ways = dict.fromkeys(row["way"] for row in rows)
    kinds = ("makespan_seconds", "wall_seconds")

    def median(way: str, kind: str) -> float:
        return statistics.median(row[kind] for row in rows if row["way"] == way)

    medians = {way: {kind: median(way, kind) for kind in kinds} for way in ways}
    return {
        "medians": medians,
        "shorter_than": {
            name: {
                peer: {kind: round(1 - medians[name][kind] / medians[peer][kind], 3) for kind in kinds}
                for peer in PEERS
                if peer in medians
            }
            for name in NIGHTS
            if name in medians
        },
    }


if __name__ == "__main__":
    main()
