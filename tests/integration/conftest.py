"""The deployment of docker/compose.yaml as local processes, started once for the tests of this folder.

Celery, Redis, Postgres, MLflow, and two nodes ``gpu-a`` and ``gpu-b`` of two CPU slots each.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from saturn_airflow.demo.airflow import Airflow
from saturn_airflow.demo.demo_services import NO_SCHEDULE
from saturn_airflow.deployment.local import LocalCluster

ROOT = Path(__file__).parents[2]


class RunningCluster(LocalCluster):
    """The cluster, and what a test does with it.

    Services are named as in the compose file: postgres, redis, mlflow, airflow (the API server), scheduler,
    dag-processor, triggerer, worker, gpu-a, gpu-b. ``kill``, ``start_again``, ``wait_ready``, ``check`` and
    ``processes.pause/resume`` are those of :class:`LocalCluster`.
    """

    airflow: Airflow

    def trigger(self, dag_id: str) -> str:
        """Start a run of a DAG, once it is parsed."""
        self.airflow.wait_for_dag(dag_id)
        return self.airflow.trigger(dag_id)

    def wait(self, dag_id: str, run_id: str, timeout: float = 1200.0) -> str:
        """The state in which a run ends."""
        return self.wait_until(
            lambda: self._ended(dag_id, run_id),
            timeout,
            lambda: f"{dag_id} has not ended: {self.states(dag_id, run_id)}",
        )

    def states(self, dag_id: str, run_id: str) -> dict[str, Any]:
        """The state of each task, by its id and the name of what it is mapped over."""
        return {
            f"{t['task_id']} {t['rendered_map_index'] or ''}".strip(): t["state"]
            for t in self.airflow.tasks(dag_id, run_id)
        }

    def wait_until(self, ask: Any, timeout: float = 400.0, say: Any = lambda: "") -> Any:
        """The first truth that ``ask()`` returns; services that were not killed must stay alive meanwhile."""
        deadline = time.monotonic() + timeout
        while not (answer := ask()):
            self.check()
            assert time.monotonic() < deadline, f"not within {timeout:.0f} s. {say()}"
            time.sleep(0.2)
        return answer

    def job_folder(self, dag_id: str, run_id: str, job: str, group: str = "sweep") -> Path:
        """Where a job keeps its checkpoints and events."""
        return self.home / "sweeps" / dag_id / run_id / group / job

    def _ended(self, dag_id: str, run_id: str) -> str | None:
        try:
            state = self.airflow.state(dag_id, run_id)
        except httpx.TimeoutException:  # a busy API server answers the next time
            return None
        return state if state in ("success", "failed") else None


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """The running cluster; its DAGs are those of ``dags/`` and of ``tests/integration/dags/``."""
    folder = tmp_path_factory.mktemp("cluster")
    shutil.copytree(ROOT / "dags", folder / "dags")
    shutil.copytree(Path(__file__).parent / "dags", folder / "dags", dirs_exist_ok=True)
    running = RunningCluster(
        folder / "state",
        ROOT / "docker" / "compose.yaml",
        folder / "dags",
        # A password may begin like an option; a node has as few slots as one sweep uses.
        variables={
            "AIRFLOW_HEARTBEAT_TIMEOUT": "30",
            "AIRFLOW_ADMIN_PASSWORD": "-p",
            "NODE_CONCURRENCY": "4",
            "WORKER_CONCURRENCY": "4",
        },
        environment={
            **NO_SCHEDULE,
            # DAG files that have not changed are not read anew every half minute.
            "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "300",
            # A node that is gone for good is given up in two minutes, not in half an hour.
            "AIRFLOW__SCHEDULER__TASK_QUEUED_TIMEOUT": "25",
            "AIRFLOW__SCHEDULER__TASK_QUEUED_TIMEOUT_CHECK_INTERVAL": "5",
            "AIRFLOW__SCHEDULER__NUM_STUCK_IN_QUEUED_RETRIES": "3",
            # A scheduler looks after the tasks of one that was killed from then on.
            "AIRFLOW__SCHEDULER__ORPHANED_TASKS_CHECK_INTERVAL": "15",
        },
    )
    begin = time.monotonic()
    with running:
        print(
            f"\nThe cluster was up after {time.monotonic() - begin:.0f} s; its logs: {running.processes.logs}"
        )
        running.airflow = Airflow(running.airflow_url, running.login)
        yield running


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Show the ends of the services' logs with a test that failed."""
    report = yield
    running = getattr(item, "funcargs", {}).get("cluster")
    if report.failed and running is not None:
        for name in running.services:
            report.sections.append((f"log of {name}", running.processes.tail(name, 15)))
    return report
