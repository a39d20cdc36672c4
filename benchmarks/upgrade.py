"""Sweeps that run during an upgrade of the head, then of the nodes: `python benchmarks/upgrade.py`.

On the deployment of docker/compose.yaml as local processes, two nodes of two CPU devices. All run the
code of a commit of `--commits` when the first sweep starts: by default the last version without numbers
in its formats, and the first with them. While its jobs train, the head's services are ended and started
again under this version; a second sweep starts, whose plan this version makes for nodes of the other;
then the nodes follow, one after the other. From a version with numbers the upgraded deployment then goes
back in the same order, with a third sweep.

All sweeps must end well. Printed: what each job has seen (the code of its runs, where it began), and what
of its losses and weights differs from those of an undisturbed training under this version.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from machine import describe
from releases import FIRST, HEAD_SERVICES, NUMBERED, UpgradableCluster, lay_out
from soak_checks import References, events, left_behind, wrong_in_mlflow, wrong_results

from saturn_airflow.demo.airflow import Airflow
from saturn_airflow.deployment.processes import end_on_signals
from saturn_airflow.model.errors import SaturnError

ROOT = Path(__file__).resolve().parents[1]
#: Copied out of this repository: what changes in it meanwhile is no change of the jobs' code.
DAGS = ROOT / "benchmarks" / "soak"
DAG, JOBS, NODES = "soaked", ("a-single", "b-single", "c-single", "d-ddp"), ("gpu-a", "gpu-b")


class Upgrading:
    """What happens on one cluster."""

    def __init__(self, cluster: UpgradableCluster) -> None:
        self.cluster = cluster
        self.airflow = Airflow(cluster.airflow_url, cluster.login)
        self.restarts = cluster.restarts(say)
        self.sweeps: list[str] = []

    def run(self, old: Path, new: Path, back: bool) -> dict[str, str]:
        """Upgrade, and go back where asked; how each sweep ended."""
        self.airflow.wait_for_dag(DAG)
        self._trigger()
        self._until("the first sweep trains", lambda: self._trains(0))
        for code in [new, old] if back else [new]:
            say(f"the head changes to {code.name}")
            self.cluster.upgrade(HEAD_SERVICES, code)
            self._trigger()
            latest = len(self.sweeps) - 1
            self._until(f"sweep {latest} has been planned", partial(self._trains, latest))
            for node in NODES:
                say(f"{node} changes to {code.name}")
                self.cluster.upgrade([node], code)
                self._until(f"{node} is there", partial(self._is_ready, node))
        return {
            run_id: self._until(f"{run_id} has ended", partial(self._ended, run_id)) for run_id in self.sweeps
        }

    def folders(self, sweep: str) -> list[Path]:
        """Those of a sweep's jobs."""
        return [self.cluster.home / "sweeps" / DAG / sweep / "sweep" / job for job in JOBS]

    def _trigger(self) -> None:
        run_id = f"sweep-{len(self.sweeps)}"
        body = {"logical_date": None, "dag_run_id": run_id}

        def sent() -> bool:
            try:
                self.airflow.send("POST", f"/dags/{DAG}/dagRuns", body)
            except httpx.HTTPStatusError as error:
                return error.response.status_code == 409
            self.airflow.send("PATCH", f"/dags/{DAG}", {"is_paused": False})
            return True

        self._until(f"{run_id} is asked for", sent)
        self.sweeps.append(run_id)

    def _trains(self, sweep: int) -> bool:
        jobs = [[e["event"] for e in events(folder)] for folder in self.folders(self.sweeps[sweep])]
        return any("step" in seen for seen in jobs)

    def _is_ready(self, name: str) -> bool:
        return "ready." in self.cluster.processes.tail(name, 12)

    def _ended(self, run_id: str) -> str | None:
        state = self.airflow.state(DAG, run_id)
        return state if state in ("success", "failed") else None

    def _until(self, what: str, ask: Callable[[], Any], timeout: float = 900.0) -> Any:
        deadline = time.monotonic() + timeout
        while True:
            self.restarts.look()
            try:
                if answer := ask():
                    say(what)
                    return answer
            except (httpx.HTTPError, SaturnError):
                pass
            if time.monotonic() > deadline:
                raise SystemExit(f"not within {timeout:.0f} s: {what}")
            time.sleep(0.5)


def say(text: str) -> None:
    """Tell what happens."""
    print(f"{time.strftime('%X')} {text}", flush=True)


def seen(folder: Path) -> dict[str, Any]:
    """What a job has seen: whose code its runs were started by, and how often it began."""
    starts = [e["step"] for e in events(folder) if e["event"] == "start"]
    specs = [json.loads(path.read_text()) for path in sorted(folder.glob("runs/*/spec.json"))]
    # The first folder of modules is that of the node's version.
    return {"code": [Path(spec["path"][0]).name for spec in specs], "began_at_steps": starts}


def main() -> None:
    """Upgrade, check, print, and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--commits", nargs="+", default=[FIRST, NUMBERED], help="whose code runs first (%(default)s)"
    )
    parser.add_argument("--batches", type=int, default=900, help="of each job, 0.1 s each (%(default)s)")
    parser.add_argument("--keep", type=Path, help="folder for the cluster, which is then kept")
    parser.add_argument("--out", type=Path, help="file for the results")
    args = parser.parse_args()
    args.out = args.out and args.out.resolve()
    end_on_signals()
    results: dict[str, Any] = {"machine": describe(), "batches": args.batches, "pairs": []}
    for commit in args.commits:
        with tempfile.TemporaryDirectory(prefix="upgrade-", ignore_cleanup_errors=True) as folder:
            place = (args.keep / commit if args.keep else Path(folder)).resolve()
            results["pairs"].append(upgrade(place, commit, commit != FIRST, args.batches))
        if args.out:
            args.out.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))
    raise SystemExit(1 if any(pair["wrong"] for pair in results["pairs"]) else 0)


def upgrade(folder: Path, commit: str, back: bool, batches: int) -> dict[str, Any]:
    """From one commit's code to this one's in ``folder``, and back where asked; its results."""
    temporary = folder / "tmp"
    temporary.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)  # `python -m` finds first what is in its folder, which must not be another version
    old = lay_out(folder / "before", "0.0.1", commit)
    new = lay_out(folder / "after", "0.2.0")
    os.environ["SOAK_BATCHES"] = str(batches)
    dags = folder / "dags"
    shutil.copytree(DAGS, dags, ignore=shutil.ignore_patterns("__pycache__"))
    cluster = UpgradableCluster(
        folder / "cluster",
        ROOT / "docker" / "compose.yaml",
        dags,
        variables={"NODE_CONCURRENCY": "6", "WORKER_CONCURRENCY": "4"},
        environment={"SOAK_BATCHES": str(batches), "TMPDIR": str(temporary)},
    )
    cluster.code = dict.fromkeys((*HEAD_SERVICES, *NODES), old)
    with cluster:
        upgrading = Upgrading(cluster)
        states = upgrading.run(old, new, back)
        jobs = {f"{run_id} {job.name}": seen(job) for run_id in states for job in upgrading.folders(run_id)}
        wrong = [f"{run_id} ended as {state}" for run_id, state in states.items() if state != "success"]
        references = References(dags)
        for run_id in states:
            for job in upgrading.folders(run_id):
                wrong += wrong_results(job, references)
        wrong += wrong_in_mlflow(cluster, len(states), len(JOBS), batches)
        wrong += left_behind(cluster, temporary)
    return {"from": commit, "and_back": back, "sweeps": states, "jobs": jobs, "wrong": wrong}


if __name__ == "__main__":
    main()
