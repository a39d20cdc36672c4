"""Several sweeps at once on the local cluster: `python benchmarks/several_sweeps.py --sweeps 2 5`.

On the deployment of docker/compose.yaml as local processes (Celery, Redis, Postgres, MLflow), two nodes of
two CPU devices. Each sweep has three jobs on one device and one on two, of 0.1 s a step; what is known of
them is measured before, by sweeps alone. The next ones are triggered some seconds apart. From what the
jobs' own events say:

- whether a device was ever held by two jobs at a time;
- of the device-seconds between the first job's begin and the last one's end, the share that was idle while a
  job that waited at that node fitted on what was free there (``idle_share``), and the same with all jobs of
  all plans that had not begun, wherever they were planned (``idle_share_anywhere``);
- whether each job's losses and weights are those of a training alone, to the last digit;
- by how much each sweep's end was off from what its plan said, and how many of the ends that plans promised
  with 90%, from how far the estimates of sweeps alone were off, were kept (nobody could know of those that
  came later), and how far they were from the ends that were as likely as not.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from machine import describe
from soak_checks import References, wrong_results
from stays import idle_share, shared, stays_of
from two_sweeps import start

from saturn_airflow.demo.airflow import Airflow
from saturn_airflow.deployment.local import LocalCluster
from saturn_airflow.deployment.processes import end_on_signals

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "benchmarks" / "soak"
DAG, DEVICES = "soaked", {"gpu-a": 2, "gpu-b": 2}


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sweeps", type=int, nargs="+", default=[2, 5], help="how many (%(default)s)")
    parser.add_argument("--apart", type=float, default=10.0, help="seconds between them (%(default)s)")
    parser.add_argument("--batches", type=int, default=300, help="of each job, 0.1 s each (%(default)s)")
    parser.add_argument("--out", type=Path, help="file for the results")
    args = parser.parse_args()
    end_on_signals()
    load = os.getloadavg()[0]
    rows = [meeting(count, args.apart, args.batches) for count in args.sweeps]
    results = {"machine": {**describe(), "load_average_before": round(load, 1)}, "rows": rows}
    print(json.dumps(results, indent=1))
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")
    raise SystemExit(any(row["wrong"] for row in rows))


def meeting(sweeps: int, apart: float, batches: int) -> dict[str, Any]:
    """Let so many sweeps meet; what came of it."""
    os.environ["SOAK_BATCHES"] = str(batches)
    with tempfile.TemporaryDirectory(prefix="several-sweeps-", ignore_cleanup_errors=True) as folder:
        cluster = LocalCluster(
            Path(folder),
            ROOT / "docker" / "compose.yaml",
            HERE,
            variables={
                "SATURN_NODES": ", ".join(f"{node}:{count}:cpu" for node, count in DEVICES.items()),
                "NODE_CONCURRENCY": "8",
            },
            environment={"SOAK_BATCHES": str(batches), "SOAK_PACE": "0.1"},
        )
        with cluster:
            airflow = Airflow(cluster.airflow_url, cluster.login)
            airflow.wait_for_dag(DAG)
            airflow.send("PATCH", f"/dags/{DAG}", {"is_paused": False})
            # The errors of estimates from history are those of sweeps that had such; a promise needs two.
            for name in ("alone-1", "alone-2", "alone-3"):
                start(airflow, DAG, name)
                _until_done(cluster, airflow, [name])
            names = [f"sweep-{number}" for number in range(sweeps)]
            for name in names:
                start(airflow, DAG, name)
                time.sleep(apart)
            wrong = [
                f"{name} ended as {state}"
                for name, state in _until_done(cluster, airflow, names).items()
                if state != "success"
            ]
            plans = {name: airflow.xcom(DAG, name, "sweep.plan", "attempt") for name in names}
            spans = {name: airflow.xcom(DAG, name, "sweep.plan", "plan")["makespan"] for name in names}
            promises = {name: airflow.xcom(DAG, name, "sweep.report").get("promise", {}) for name in names}
            folders = {name: sorted(cluster.home.glob(f"sweeps/*/{name}/sweep/*/runs")) for name in names}
            stays = {
                name: [stay for path in folders[name] for stay in stays_of(path.parent, plans[name])]
                for name in names
            }
            references = References(HERE)
            for path in (path for of_sweep in folders.values() for path in of_sweep):
                wrong += wrong_results(path.parent, references)
    everybody = [stay for of_sweep in stays.values() for stay in of_sweep]
    wrong += shared(everybody)
    actual = {name: max(stay.ended for stay in stays[name]) - plans[name] for name in names}
    return {
        "sweeps": sweeps,
        "jobs": len(everybody),
        "seconds_apart": apart,
        "idle_share": round(idle_share(everybody, DEVICES, lambda stay: stay.asked), 4),
        "idle_share_anywhere": round(
            idle_share(everybody, DEVICES, lambda stay: stay.planned, anywhere=True), 4
        ),
        "ends": {
            name: {"planned": round(spans[name], 1), "actual": round(actual[name], 1)} for name in names
        },
        "promises": promised(promises.values()),
        "wrong": wrong,
    }


def promised(promises: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """What became of the ends with odds."""
    found = [one for one in promises if one.get("seconds") is not None and one.get("kept") is not None]
    return {
        "confidence": [one["confidence"] for one in found],
        "promised": [round(one["seconds"], 1) for one in found],
        "as_likely_as_not": [round(one["median"], 1) for one in found],
        "took": [round(one["took"], 1) for one in found],
        "kept": sum(one["kept"] for one in found),
        "of": len(found),
    }


def _until_done(cluster: LocalCluster, airflow: Airflow, names: list[str]) -> dict[str, str]:
    states: dict[str, str] = {}
    while len(states) < len(names):
        cluster.check()
        for name in names:
            if (state := airflow.state(DAG, name)) in ("success", "failed"):
                states[name] = state
        time.sleep(1)
    return states


if __name__ == "__main__":
    main()
