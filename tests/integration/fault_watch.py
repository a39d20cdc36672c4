"""What the tests of faults see of a sweep while it runs."""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import psutil

from saturn_airflow.launch import leases, runs


class Watched:
    """A DAG run with one sweep in it."""

    def __init__(self, cluster: Any, dag_id: str) -> None:
        self.cluster, self.dag_id = cluster, dag_id
        self.run_id = cluster.trigger(dag_id)
        self.triggered = time.monotonic()

    def folder(self, job: str) -> Path:
        return Path(self.cluster.job_folder(self.dag_id, self.run_id, job))

    def events(self, job: str, *names: str) -> list[dict[str, Any]]:
        """All events so far, or those of these names, each with the number of its run."""
        found = []
        for path in sorted(self.folder(job).glob("runs/*/events.jsonl")):
            for line in path.read_text().splitlines(keepends=True):
                if line.endswith("\n"):
                    event = {**json.loads(line), "run": int(path.parent.name)}
                    if not names or event["event"] in names:
                        found.append(event)
        return found

    def steps(self, job: str) -> list[int]:
        return [event["step"] for event in self.events(job, "step")]

    def node(self, job: str) -> str:
        """The node that a job was last put on."""
        run = runs.all_of(self.folder(job))[-1]
        return run.spec.node

    def losses(self, job: str) -> dict[int, float]:
        return {event["step"]: event["loss"] for event in self.events(job, "step")}

    def task(self, job: str) -> dict[str, Any]:
        """The task instance that trains a job."""
        tasks = self.cluster.airflow.tasks(self.dag_id, self.run_id)
        return next(t for t in tasks if ".train" in t["task_id"] and t["rendered_map_index"] == job)

    def states(self) -> Any:
        """The states of its tasks."""
        return self.cluster.states(self.dag_id, self.run_id)

    def why(self) -> str:
        """The states of its tasks, and what those that failed said last."""
        said = [str(self.states())]
        for task in self.cluster.airflow.tasks(self.dag_id, self.run_id):
            if task["state"] == "failed":
                place = (task["task_id"], task["map_index"], task["try_number"])
                lines = self.cluster.airflow.log(self.dag_id, self.run_id, *place)
                said += [f"--- {place}", *lines[-30:]]
        return "\n".join(said)

    def ended(self) -> str | None:
        """The state of the DAG run once it has ended."""
        state = str(self.cluster.airflow.state(self.dag_id, self.run_id))
        return state if state in ("success", "failed") else None

    def result(self) -> dict[str, dict[str, Any]]:
        """The outcomes by job."""
        result = self.cluster.airflow.xcom(self.dag_id, self.run_id, "sweep.report")
        return {outcome["job"]: outcome for outcome in result["jobs"]}

    def processes(self, job: str) -> list[psutil.Process]:
        """All processes of a job's training."""
        run = runs.attach(self.folder(job))
        assert run is not None, f"{job} does not train"
        supervisor = psutil.Process(int((run.folder / "alive").read_text()))
        return [supervisor, *supervisor.children(recursive=True)]

    def holders(self, job: str) -> set[int]:
        """The processes that hold devices for a job."""
        found = leases.holders(self.cluster.leases).values()
        return {holder.pid for holder in found if holder.who.endswith(f"{self.run_id}/sweep: {job}")}

    def is_followed(self, job: str) -> bool:
        """Whether a task follows the job's training."""
        with open(self.folder(job) / "follower") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def hurry(self, *jobs: str) -> None:
        """Let long jobs go on at full speed."""
        for job in jobs:
            (Path(self.cluster.home) / f"hurry-{job}").touch()

    def metric_steps(self, run_id: str) -> list[int]:
        """The steps at which MLflow has a loss."""
        history = mlflow.MlflowClient(self.cluster.mlflow_url).get_metric_history(run_id, "loss")
        return [metric.step for metric in history]


def patiently(cluster: Any, ask: Callable[[], Any], timeout: float, say: Any = lambda: "") -> Any:
    """The first truth that ``ask()`` returns. Services that end are started again, as compose does."""
    deadline = time.monotonic() + timeout
    while True:
        for name in cluster.processes.running():
            if cluster.processes.ended(name) is not None:
                cluster.kill(name)
                cluster.start_again(name, wait=False)
        if answer := ask():
            return answer
        assert time.monotonic() < deadline, f"not within {timeout:.0f} s. {say()}"
        time.sleep(0.2)


def gone(processes: list[psutil.Process]) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)
