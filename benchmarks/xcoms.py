"""What tasks of a large sweep read from Airflow and write to it: `python benchmarks/xcoms.py --jobs 1000`.

A real Airflow on a new SQLite database: its execution API answers in this process, as `dag.test()` has
it, and each of the sweep's tasks runs as it does on a worker, one after another. All jobs are planned,
and every 25th trains one step (`--every`); the tasks of the others are counted as done without having
run, since what a task reads and writes does not depend on them. Counted are the requests of each task
that runs, and the bytes of what was sent and answered.

Printed, by kind of task: how many there were, requests and bytes of one (median, most), and bytes in all.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import httpx
from machine import describe

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "benchmarks" / "handing_on"


class Counted:
    """Requests and bytes by task."""

    def __init__(self) -> None:
        self.sizes: dict[str, list[int]] = defaultdict(list)
        self._task = "none"

    def run_every(self, every: int) -> None:
        """Of the tasks that train, run one of so many; the others succeed unrun."""
        from airflow.sdk.definitions import dag as module

        run = module._run_task

        def chosen(*, ti: Any, **more: Any) -> Any:
            if ti.map_index > 0 and ti.map_index % every:
                return ti.set_state("success")
            return run(ti=ti, **more)

        module._run_task = chosen

    def count(self) -> None:
        """From now on, of all that tasks ask."""
        from airflow.sdk.api.client import Client

        send = Client.send

        def counted(client: Any, request: httpx.Request, **more: Any) -> httpx.Response:
            parts = request.url.path.strip("/").split("/")
            if parts[0] == "task-instances" and parts[-1] == "run":
                self._task = parts[1]
            response = send(client, request, **more)
            self.sizes[self._task].append(
                len(request.url.query) + len(request.content) + len(response.content)
            )
            return response

        changed: Any = Client
        changed.send = counted


def main() -> None:
    """Run, print, and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=1000, help="of the sweep (%(default)s)")
    parser.add_argument("--every", type=int, default=25, help="one of so many trains (%(default)s)")
    parser.add_argument("--out", type=Path, help="file for the results")
    args = parser.parse_args()
    args.out = args.out and args.out.resolve()
    with tempfile.TemporaryDirectory(prefix="saturn-xcoms-", ignore_cleanup_errors=True) as folder:
        results = measure(Path(folder), args.jobs, args.every)
    print(json.dumps(results, indent=1))
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")
    raise SystemExit(0 if results["state"] == "success" else 1)


def measure(folder: Path, jobs: int, every: int) -> dict[str, Any]:
    """One sweep of so many jobs in ``folder``."""
    os.environ |= {
        "AIRFLOW_HOME": str(folder),
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{folder}/airflow.db",
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__DAGS_FOLDER": str(HERE),
        "AIRFLOW__CORE__MAX_MAP_LENGTH": str(max(jobs, 1024)),
        "AIRFLOW__LOGGING__LOGGING_LEVEL": "ERROR",
        "AIRFLOW__SATURN__HOME": str(folder / "saturn"),
        "AIRFLOW__SATURN__LEASES_FOLDER": str(folder / "leases"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
        "MANY_JOBS": str(jobs),
    }
    subprocess.run([sys.executable, "-m", "airflow", "db", "migrate"], check=True, stdout=subprocess.DEVNULL)
    sys.path.insert(0, str(HERE))
    sweep = importlib.import_module("many").sweep  # only now is Airflow told where it lives

    counted = Counted()
    counted.count()
    counted.run_every(every)
    began = time.monotonic()
    run = sweep.test()
    names = {str(ti.id): ti.task_id for ti in run.get_task_instances()}
    by_kind = defaultdict(list)
    for task, sizes in counted.sizes.items():
        by_kind[names.get(task, "none of them")].append(sizes)
    return {
        "machine": describe(),
        "jobs": jobs,
        "every": every,
        "state": str(run.state),
        "seconds": round(time.monotonic() - began),
        "megabytes_of_those_that_ran": round(sum(map(sum, counted.sizes.values())) / 1e6, 2),
        "by_task": {kind: _of(tasks) for kind, tasks in sorted(by_kind.items())},
    }


def _of(tasks: list[list[int]]) -> dict[str, Any]:
    """Of several tasks of a kind, each with the bytes of its requests."""
    requests, sizes = [len(task) for task in tasks], [sum(task) for task in tasks]
    return {
        "tasks": len(tasks),
        "requests": {"median": statistics.median(requests), "most": max(requests)},
        "bytes": {"median": statistics.median(sizes), "most": max(sizes)},
        "bytes_in_all": sum(sizes),
    }


if __name__ == "__main__":
    main()
