"""What a sweep of 100 jobs adds to parsing a DAG file: `python benchmarks/parsing.py [--out FILE]`.

Starts fresh interpreters by turns, one that imports airflow.sdk alone, one that also loads the names a
DAG file uses, and one that also imports saturn_airflow and builds the sweep; prints medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import describe

ALONE = "import airflow.sdk"
# airflow.sdk loads its names on demand: what any DAG file with a task group and an asset pays.
NAMES = "from airflow.sdk import dag, Asset, BaseOperator, TaskGroup, XComArg"
SWEEP = """
from airflow.sdk import dag
from saturn_airflow import Cluster, HParams, Job, Node, SaturnSweepOperator, grid
@dag(schedule=None)
def nightly():
    SaturnSweepOperator(
        task_id="sweep",
        jobs=grid(Job("gpt2-{lr}-{batch_size}", load_model="shop.models:gpt2",
                      load_dataloader="shop.data:python_text", loss_function="shop.models:lm_loss",
                      techniques=["single", "ddp", "fsdp"]),
                  lr=[i / 1000 for i in range(50)], batch_size=[16, 32]),
        cluster=Cluster(Node("gpu-a", devices=8), Node("gpu-b", devices=8)))
nightly()
"""


def seconds(code: str, home: str) -> float:
    """Wall time of a fresh interpreter that runs ``code``, in seconds."""
    dags = str(Path(__file__).parents[1] / "dags")
    started = time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "AIRFLOW_HOME": home, "PYTHONPATH": dags},
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return time.perf_counter() - started


def main() -> None:
    """Measure, print, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        seconds(SWEEP, home)
        rounds = [[seconds(code, home) for code in (ALONE, NAMES, SWEEP)] for _ in range(args.repeats)]
    figures = {
        "airflow_sdk_seconds": statistics.median(r[0] for r in rounds),
        "airflow_sdk_names_seconds": statistics.median(r[1] for r in rounds),
        "with_sweep_of_100_jobs_seconds": statistics.median(r[2] for r in rounds),
        "added_to_airflow_sdk_seconds": statistics.median(r[2] - r[0] for r in rounds),
        "added_to_names_seconds": statistics.median(r[2] - r[1] for r in rounds),
        "repeats": args.repeats,
        "machine": describe(),
    }
    print(json.dumps(figures, indent=2))
    if args.out:
        args.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
