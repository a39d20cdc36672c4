"""`saturn doctor` on the running cluster, whole and broken."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.services, pytest.mark.timeout(1200)]
SATURN = str(Path(sys.executable).parent / "saturn")


@pytest.fixture
def doctor(cluster: Any) -> Any:
    """Run `saturn doctor --json` as on the main machine: its exit status, and the findings by level."""

    def run(*arguments: str, **settings: str) -> tuple[int, dict[str, list[str]]]:
        done = subprocess.run(
            [SATURN, "doctor", "--json", *arguments],
            env={**cluster.environment("scheduler"), **settings},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.stdout, done.stderr
        levels: dict[str, list[str]] = {"ok": [], "warning": [], "problem": []}
        for finding in json.loads(done.stdout)["findings"]:
            said = f"{finding['check']}: {finding['text']}"
            levels[finding["level"]].append(f"{said} -> {finding['fix']}" if finding["fix"] else said)
        return done.returncode, levels

    return run


def test_a_whole_deployment_has_nothing_to_mend(doctor: Any) -> None:
    # The cluster's own gives up early (conftest.py).
    status, levels = doctor(AIRFLOW__SCHEDULER__NUM_STUCK_IN_QUEUED_RETRIES="29")
    assert (status, levels["problem"], levels["warning"]) == (0, [], [])
    said = "\n".join(levels["ok"])
    for check in ("versions", "airflow", "queues", "nodes", "limits", "storage", "leases", "mlflow"):
        assert f"{check}: " in said
    assert "gpu-a: 2 x cpu" in said
    assert "is shared by" in said


def test_whatever_is_broken_is_named_with_its_fix(
    doctor: Any, cluster: Any, tmp_path: Path, orphan: Any
) -> None:
    """MLflow is down, nobody takes the short tasks, gpu-b has storage of its own, limits starve a sweep."""
    for name in ("mlflow", "worker", "gpu-b"):
        cluster.kill(name)
    elsewhere = {**cluster.environment("gpu-b"), "AIRFLOW__SATURN__HOME": str(tmp_path)}
    cluster.processes.launch("gpu-b-elsewhere", cluster.services["gpu-b"].command, elsewhere)
    try:
        cluster.wait_ready("gpu-b")
        status, levels = doctor(
            AIRFLOW__CORE__MAX_ACTIVE_TASKS_PER_DAG="3",
            AIRFLOW__CELERY_BROKER_TRANSPORT_OPTIONS__VISIBILITY_TIMEOUT="3600",
        )
    finally:
        cluster.kill("gpu-b-elsewhere")
        for name in ("mlflow", "worker", "gpu-b"):
            cluster.start_again(name, wait=False)
        for name in ("mlflow", "worker", "gpu-b"):
            cluster.wait_ready(name)
    assert status == 1
    problems, warnings = "\n".join(levels["problem"]), "\n".join(levels["warning"])
    assert "no worker listens on 'default' (short tasks)" in problems
    assert "-> airflow celery worker --queues default" in problems
    assert "gpu-a does not reach MLflow" in problems
    assert "mlflow: http://" in problems
    assert "-> start the MLflow server" in problems
    assert f"gpu-a does not see what gpu-b writes to {tmp_path}" in problems
    assert "mount one shared folder on all nodes" in problems
    assert "gpu-a-cpu1 is held for a lost job, whose process is gone" in problems
    assert f"kill {orphan}" in problems
    assert "max_active_tasks_per_dag is 3; a sweep over all nodes has 8 tasks at once" in warnings
    assert "visibility_timeout is 1 h" in warnings


def test_the_connection_of_airflow_is_what_counts_for_mlflow(doctor: Any, cluster: Any) -> None:
    connection = {"connection_id": "mlflow_default", "conn_type": "http", "host": "http://127.0.0.1:9"}
    cluster.airflow.send("POST", "/connections", connection)
    try:
        status, levels = doctor()
    finally:
        cluster.airflow.delete("/connections/mlflow_default")
    assert status == 1
    problems = "\n".join(levels["problem"])
    assert "mlflow: http://127.0.0.1:9/health" in problems
    assert "gpu-a does not reach MLflow" in problems


def test_a_node_that_can_not_write_is_found_on_the_node(doctor: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    # A folder can't be made below a file, whoever asks.
    status, levels = doctor("--node", "gpu-a", AIRFLOW__SATURN__HOME=str(tmp_path / "file" / "home"))
    assert status == 1
    assert len(levels["problem"]) == 1
    assert "gpu-a can't write to" in levels["problem"][0]
    assert "-> let the worker's user write there, or set [saturn] home" in levels["problem"][0]


def test_a_node_that_does_not_exist_is_a_problem(doctor: Any) -> None:
    status, levels = doctor("--node", "gpu-x")
    assert status == 1
    assert "'gpu-x' is no node of this deployment, which has gpu-a, gpu-b" in levels["problem"][0]


@pytest.fixture
def orphan(cluster: Any) -> Iterator[Any]:
    """The id of a process that keeps a device of gpu-a which the one that leased it died with."""
    code = (
        "import os, sys, pathlib, subprocess\n"
        "from saturn_airflow.training import leases\n"
        "lease = leases.acquire(['gpu-a-cpu1'], 'a lost job', folder=pathlib.Path(sys.argv[1]))\n"
        "child = subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL, pass_fds=lease.files)\n"
        "print(child.pid, flush=True)\n"
        "os._exit(1)\n"
    )
    command = [sys.executable, "-c", code, str(cluster.leases)]
    child = int(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout)
    yield child
    os.kill(child, signal.SIGKILL)
