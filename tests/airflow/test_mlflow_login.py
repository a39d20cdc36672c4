"""A sweep whose MLflow asks for a login: the connection's user is all that its tasks and commands know."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from saturn_airflow.deployment.compose import interpolate
from saturn_airflow.deployment.processes import HOST, Processes, free_port

pytestmark = pytest.mark.services
DOCKER = Path(__file__).parents[2] / "docker"
ADMIN, USER, READER = (
    ("admin", "of-the-admin-1"),
    ("sweeps", "pass:word/of sweeps-2"),
    ("ann", "of-ann-3-long"),
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """MLflow as docker/login.yaml starts it, but for its database: its address, and its folder."""
    folder = tmp_path_factory.mktemp("mlflow")
    port = str(free_port(5000))
    secrets = {
        "MLFLOW_ADMIN_PASSWORD": ADMIN[1],
        "MLFLOW_SECRET_KEY": "k" * 32,
        "MLFLOW_DATABASE_PASSWORD": "-",
    }
    sizes = {"LISTEN": HOST, "MLFLOW_PORT": port, "MLFLOW_WORKERS": "1"}
    body = yaml.safe_load((DOCKER / "login.yaml").read_text())["services"]["mlflow"]
    service = interpolate(body, {**secrets, **sizes})
    asked = (DOCKER / "mlflow-login.ini").read_text()
    (folder / "login.ini").write_text(
        asked.replace("postgresql+psycopg2:///mlflow", f"sqlite:///{folder}/login.db")
    )
    processes = Processes(folder / "logs")
    environment = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "HOME": str(folder),
        **service["environment"],
        "MLFLOW_AUTH_CONFIG_PATH": str(folder / "login.ini"),
        "MLFLOW_BACKEND_STORE_URI": f"sqlite:///{folder}/mlflow.db",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    words = [word.replace("/var/lib/mlflow", str(folder / "artifacts")) for word in service["command"]]
    processes.launch("mlflow", words, environment, folder)
    url = f"http://{HOST}:{port}"
    try:
        deadline = time.monotonic() + 120
        while not _answers(url):
            processes.check()
            assert time.monotonic() < deadline, processes.tail("mlflow")
            time.sleep(0.3)
        for name, password in (USER, READER):
            made = {"username": name, "password": password}
            _post(url, "users/create", made, ADMIN).raise_for_status()
        yield url, folder
    finally:
        processes.stop()


@pytest.fixture(scope="module")
def connected(deployment: Any, server: Any) -> Iterator[Any]:
    """The deployment with ``mlflow_default`` for the server and its user."""
    parts = httpx.URL(server[0])
    body = {"connection_id": "mlflow_default", "conn_type": "http", "host": parts.host, "port": parts.port}
    login = {"login": USER[0], "password": USER[1]}
    deployment.airflow._client.post("/connections", json={**body, **login}).raise_for_status()
    yield deployment
    deployment.airflow.delete("/connections/mlflow_default")


@pytest.mark.parametrize("login", [None, ("sweeps", "wrong"), ("nobody", "nobody-at-all-1")])
def test_who_has_no_login_is_refused(server: Any, login: Any) -> None:
    url, _ = server
    for path, body in (
        ("experiments/search", {"max_results": 1}),
        ("experiments/create", {"name": "mine"}),
        ("registered-models/create", {"name": "mine"}),
    ):
        assert _post(url, path, body, login).status_code == 401, path
    assert httpx.get(f"{url}/api/2.0/mlflow-artifacts/artifacts", trust_env=False).status_code == 401


def test_a_sweep_is_tracked_by_the_connections_user(
    connected: Any, server: Any, figure: Callable[[str], None]
) -> None:
    url, folder = server
    run_id = connected.start("small_sweep")
    assert connected.wait("small_sweep", run_id) == "success"
    result = connected.airflow.xcom("small_sweep", run_id, "sweep.report")
    uri = result["best"]["model_uri"]
    found = _post(url, "experiments/search", {"max_results": 100}, USER).json()["experiments"]
    ours = [e["experiment_id"] for e in found if e["name"] == "small_sweep/sweep" or "small" in e["name"]]
    runs = _post(url, "runs/search", {"experiment_ids": ours}, USER).json()["runs"]
    assert {run["info"]["status"] for run in runs} == {"FINISHED"}
    assert any(metric["key"] == "loss" for run in runs for metric in run["data"].get("metrics", ()))
    # The model lies where only the server writes.
    assert list((folder / "artifacts").rglob("model.safetensors")), uri
    # Another user may read, and change nothing.
    run = runs[0]["info"]["run_id"]
    assert _post(url, "runs/search", {"experiment_ids": ours}, READER).status_code == 200
    refused = _post(url, "runs/log-metric", {"run_id": run, "key": "x", "value": 1, "timestamp": 1}, READER)
    assert refused.status_code == 403
    for arguments in (["sweeps", "--json"], ["estimates", "--json"]):
        told = _saturn(connected, *arguments)
        assert told.returncode == 0, told.stderr
        assert "small" in json.dumps(json.loads(told.stdout))
        assert USER[1] not in told.stdout + told.stderr
    state, looked_at = connected.services.state, 0
    for path in state.rglob("*"):
        if path.is_file() and not path.name.startswith("airflow.db"):
            looked_at += 1
            assert USER[1].encode() not in path.read_bytes(), path
    figure(f"looked for the password of MLflow's user in {looked_at} files")


def test_a_wrong_password_is_told_and_costs_no_training(connected: Any, server: Any) -> None:
    changed = {"connection_id": "mlflow_default", "conn_type": "http", "password": "wrong-by-now"}
    path = "/connections/mlflow_default?update_mask=password"
    connected.airflow._client.patch(path, json=changed).raise_for_status()
    told = _saturn(connected, "sweeps")
    assert told.returncode == 2
    assert "authenticated" in told.stderr


def _saturn(deployment: Any, *arguments: Any) -> Any:
    command = [sys.executable, "-m", "saturn_airflow.cli", *arguments]
    environment = {k: v for k, v in deployment.services.environment.items() if k != "MLFLOW_TRACKING_URI"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


def _answers(url: Any) -> Any:
    try:
        return httpx.get(f"{url}/health", timeout=2, trust_env=False).is_success
    except httpx.TransportError:
        return False


def _post(url: Any, path: Any, body: Any, login: Any) -> Any:
    return httpx.post(f"{url}/api/2.0/mlflow/{path}", json=body, auth=login, timeout=30, trust_env=False)
