"""A real sweep on CPU devices in which one job's estimate is off by 3 times: planned, one shot, with rounds.

    python benchmarks/real_rounds.py [--again 1]

Runs the sweeps ``one_round`` and ``five_rounds`` of ``tests/airflow/dags``, each on an Airflow and an MLflow
of its own (the next sweep would know better), and writes what they took into
``benchmarks/results/real_rounds.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import describe

from saturn_airflow.demo.airflow import Airflow
from saturn_airflow.demo.demo_services import Services

HERE = Path(__file__).parent
DAGS = HERE.parent / "tests" / "airflow" / "dags"
RESULTS = HERE / "results" / "real_rounds.json"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--again", type=int, default=1, metavar="N", help="how often each sweep runs")
    parser.add_argument(
        "--samples",
        default="12800",
        help="of each job: of four thousandths of a second in a trial (%(default)s)",
    )
    args = parser.parse_args()
    os.environ["SAMPLES"] = args.samples
    rows = []
    for number in range(args.again):
        for dag_id in ("one_round", "five_rounds"):
            row = {"sweep": dag_id, "number": number, **fresh_run(dag_id)}
            print(json.dumps(row), flush=True)
            rows.append(row)
    load = os.getloadavg()[1]
    RESULTS.write_text(
        json.dumps(
            {
                "machine": {**describe(), "load_5_minutes": load},
                "samples": int(args.samples),
                "rows": rows,
            },
            indent=1,
        )
        + "\n"
    )
    return 0


def fresh_run(dag_id: str) -> dict[str, Any]:
    """One sweep where nothing is known yet."""
    with tempfile.TemporaryDirectory() as folder:
        dags = Path(folder) / "dags"
        dags.mkdir()
        for name in ("slow_later.py", "rounds_sweeps.py"):
            shutil.copy(DAGS / name, dags)
        with Services(Path(folder) / "state", dags) as services:
            return run(Airflow(services.airflow_url), dag_id)


def run(airflow: Airflow, dag_id: str) -> dict[str, Any]:
    """One sweep, and what its report says."""
    airflow.wait_for_dag(dag_id)
    run_id = airflow.trigger(dag_id)
    while airflow.state(dag_id, run_id) not in ("success", "failed"):
        time.sleep(1.0)
    result = airflow.xcom(dag_id, run_id, "sweep.report")
    plans = [
        airflow.xcom(dag_id, run_id, f"sweep.round_{n + 1}.plan") for n in range(result.get("rounds", 0))
    ]
    kept = ("planned_seconds", "actual_seconds", "utilisation", "sweep_seconds", "rounds")
    return {
        **{key: result.get(key) for key in kept},
        "moves": [
            f"{entry['name']}: {entry['moved_from']} -> {entry['technique']} x {entry['devices']}"
            for entries in plans
            for entry in entries
            if entry.get("moved_from")
        ],
        "jobs": {
            o["job"]: [o["technique"], o["devices"], round(o["actual_seconds"], 1)] for o in result["jobs"]
        },
    }


if __name__ == "__main__":
    sys.exit(main())
