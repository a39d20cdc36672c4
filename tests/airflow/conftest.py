"""A real Airflow and a real MLflow, started once for the tests of this folder."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from saturn_airflow.demo.airflow import Airflow
from saturn_airflow.demo.demo_services import Services

ROOT = Path(__file__).parents[2]


@dataclass
class Deployment:
    """The services, and what a test does with them."""

    services: Services
    airflow: Airflow

    def start(self, dag_id: str) -> str:
        self.airflow.wait_for_dag(dag_id)
        return self.airflow.trigger(dag_id)

    def wait(self, dag_id: str, run_id: str, timeout: float = 1200.0) -> str:
        deadline, state = time.monotonic() + timeout, "unknown"
        while time.monotonic() < deadline:
            self.services.check()
            with contextlib.suppress(httpx.TimeoutException):  # a busy API server answers the next time
                state = self.airflow.state(dag_id, run_id)
            if state in ("success", "failed"):
                if state == "failed":
                    self._show_failures(dag_id, run_id)
                return state
            time.sleep(0.5)
        raise AssertionError(f"{dag_id} is {state} after {timeout} s: {self.states(dag_id, run_id)}")

    def _show_failures(self, dag_id: str, run_id: str) -> None:
        """Print the ends of the logs of tasks that failed; pytest shows it with a test that fails."""
        for t in self.airflow.tasks(dag_id, run_id):
            if t["state"] == "failed":
                lines = self.airflow.log(dag_id, run_id, t["task_id"], t["map_index"], t["try_number"])
                print(f"{t['task_id']} {t['rendered_map_index']}:", *lines[-60:], sep="\n")

    def states(self, dag_id: str, run_id: str) -> dict[str, Any]:
        return {
            f"{t['task_id']} {t['rendered_map_index'] or ''}".strip(): t["state"]
            for t in self.airflow.tasks(dag_id, run_id)
        }

    def job_folder(self, dag_id: str, run_id: str, job: str) -> Path:
        return self.services.state / "jobs" / "sweeps" / dag_id / run_id / "sweep" / job


@pytest.fixture(scope="session")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("deployment")
    shutil.copytree(ROOT / "dags", folder / "dags")
    shutil.copytree(Path(__file__).parent / "dags", folder / "dags", dirs_exist_ok=True)
    # Servers there import what their jobs need, and nothing for the tests of ranks.
    with Services(folder / "state", folder / "dags", {"SATURN_WARM_IMPORTS": ""}) as services:
        yield Deployment(services, Airflow(services.airflow_url))
