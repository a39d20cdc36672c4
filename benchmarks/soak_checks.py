"""What benchmarks/soak.py looks at when it is over: results, MLflow, and what is left behind."""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlflow

from saturn_airflow.deployment.local import LocalCluster
from saturn_airflow.launch import leases, runs

WEIGHTS = Path("model") / "model.safetensors"
#: What may outlive a sweep: the server that trainings are forked from ends by itself, later.
_MAY_STAY = "saturn_airflow.launch.fork_server"


def events(folder: Path) -> Iterator[dict[str, Any]]:
    """All events of a job, first to last, each with the number of its run."""
    for path in sorted(folder.glob("runs/*/events.jsonl")):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                yield {**json.loads(line), "run": path.parent.name}


class References:
    """The same jobs under the same strategies, trained by themselves, disturbed by nothing."""

    def __init__(self, dags: Path) -> None:
        self._dags = dags
        self._folder = Path(tempfile.mkdtemp(prefix="soak-references-"))
        self._known: dict[tuple[str, str, int], Path] = {}

    def of(self, run: runs.Run) -> Path:
        """The folder of the undisturbed training of what ``run`` trained."""
        spec = run.spec
        key = (spec.job.name, spec.technique, spec.devices)
        if key not in self._known:
            folder = self._folder / "-".join(map(str, key))
            os.environ |= {"SOAK_PACE": "0", "SATURN_PASS_ENVIRONMENT": "SOAK_*"}
            alone = replace(
                spec,
                folder=str(folder),
                node="reference",
                leases_folder=str(self._folder / "leases"),
                outlive_seconds=0.0,
                most_seconds=None,
                path=(str(self._dags),),
                warnings=(),
            )
            end = runs.start(alone).wait()
            assert end["status"] == "finished", end
            self._known[key] = folder
        return self._known[key]


def wrong_results(folder: Path, references: References) -> list[str]:
    """What a job's losses and weights differ in from those of an undisturbed training, to the last digit."""
    found = runs.all_of(folder)
    if not found:
        return [f"{folder.name} never ran"]
    reference = references.of(found[-1])
    expected = {e["step"]: e["loss"] for e in events(reference) if e["event"] == "step"}
    wrong, seen = [], set()
    for event in events(folder):
        if event["event"] == "step":
            seen.add(event["step"])
            if event["loss"] != expected[event["step"]]:
                wrong.append(f"{folder}: loss {event['loss']} at step {event['step']}, not as undisturbed")
    if missing := set(expected) - seen:
        wrong.append(f"{folder}: steps {sorted(missing)} are missing")
    if not (folder / WEIGHTS).exists():
        wrong.append(f"{folder}: it has no model")
    elif (folder / WEIGHTS).read_bytes() != (reference / WEIGHTS).read_bytes():
        wrong.append(f"{folder}: other weights than undisturbed")
    return wrong[:5]


def wrong_in_mlflow(cluster: LocalCluster, sweeps: int, jobs: int, batches: int) -> list[str]:
    """What MLflow has twice, or not at all."""
    client = mlflow.MlflowClient(cluster.mlflow_url)
    experiments = [e.experiment_id for e in client.search_experiments() if "estimates" not in e.name]
    found = client.search_runs(experiments, max_results=5000)
    children = [run for run in found if "mlflow.parentRunId" in run.data.tags]
    parents = [run for run in found if "mlflow.parentRunId" not in run.data.tags]
    wrong = []
    if (len(parents), len(children)) != (sweeps, sweeps * jobs):
        wrong.append(
            f"MLflow has {len(parents)} sweeps and {len(children)} jobs, not {sweeps} of {jobs} each"
        )
    for run in children:
        steps = Counter(m.step for m in client.get_metric_history(run.info.run_id, "loss"))
        twice = [step for step, count in steps.items() if count > 1]
        missing = set(range(1, batches + 1)) - set(steps)
        if twice or missing:
            wrong.append(f"{run.info.run_name} in MLflow: steps {twice} twice, {sorted(missing)} missing")
        if run.info.status != "FINISHED":
            wrong.append(f"{run.info.run_name} in MLflow is {run.info.status}")
    return wrong


def left_behind(cluster: LocalCluster, temporary: Path) -> list[str]:
    """Processes, leases and files that nobody needs any more.

    :param temporary: the folder for temporary files that all services had.
    """
    left = [f"{device} is held by {holder.who}" for device, holder in leases.holders(cluster.leases).items()]
    left += [f"{waiter.who} waits for devices" for waiter in leases.waiters(cluster.leases)]
    for name in cluster.services:
        main = cluster.processes.pid(name) if name in cluster.processes.running() else None
        for pid in cluster.processes.marked(name):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                if os.getpgid(pid) == main or _MAY_STAY in command or not command:
                    continue
            except OSError:
                continue
            left.append(f"a process of {name}: {command}")
    left += [f"a file {path.name}" for path in sorted(temporary.glob("saturn-*"))]
    return left
