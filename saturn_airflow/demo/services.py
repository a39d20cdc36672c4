"""Airflow and MLflow as local processes that listen on 127.0.0.1 only and end when they are told to."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import httpx

from saturn_airflow.errors import SaturnError

HOST = "127.0.0.1"


class Services:
    """MLflow and a small Airflow (SQLite, LocalExecutor); all their state is in one folder.

    :param state: the folder; made when it is not there.
    :param dags: the DAGs folder.
    :raises SaturnError: from :meth:`start`, when a service ends early or does not answer in time.
    """

    def __init__(self, state: Path, dags: Path, settings: Mapping[str, str] | None = None) -> None:
        self.state = state.resolve()
        self.logs = self.state / "logs"
        self.airflow_url = f"http://{HOST}:{free_port(8080)}"
        self.mlflow_url = f"http://{HOST}:{free_port(5000)}"
        self.environment = {
            **os.environ,
            **airflow_settings(self.state, dags.resolve(), self.airflow_url),
            "MLFLOW_TRACKING_URI": self.mlflow_url,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            **(settings or {}),
        }
        self._commands: dict[str, tuple[str, ...]] = {}
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, timeout: float = 120.0) -> None:
        """Start everything and wait until it answers, at most ``timeout`` seconds."""
        self.logs.mkdir(parents=True, exist_ok=True)
        store = f"sqlite:///{self.state}/mlflow.db"
        artifacts = str(self.state / "mlflow-artifacts")
        port = self.mlflow_url.rsplit(":", 1)[1]
        self._launch(
            "mlflow",
            *("mlflow", "server", "--host", HOST, "--port", port, "--workers", "1"),
            *("--backend-store-uri", store, "--artifacts-destination", artifacts),
        )
        self._run("airflow-migrate", "airflow", "db", "migrate")
        port = self.airflow_url.rsplit(":", 1)[1]
        self._launch("airflow-api", "airflow", "api-server", "--host", HOST, "--port", port, "--workers", "1")
        self._launch("airflow-dags", "airflow", "dag-processor")
        self._launch("airflow-scheduler", "airflow", "scheduler", "--skip-serve-logs")
        deadline = time.monotonic() + timeout
        self._wait("mlflow", f"{self.mlflow_url}/health", deadline)
        self._wait("airflow-api", f"{self.airflow_url}/api/v2/version", deadline)

    def kill(self, name: str) -> None:
        """End one service at once, as a fault would; :meth:`revive` starts it again."""
        process = self._running.pop(name)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def revive(self, name: str) -> None:
        """Start a service again that was killed."""
        self._launch(name, *self._commands[name])

    def check(self) -> None:
        """Raise when a service has ended by itself.

        :raises SaturnError: naming the service, with the end of its log.
        """
        for name, process in self._running.items():
            if process.poll() is not None:
                raise SaturnError(f"{name} ended with exit status {process.returncode}:\n{self._tail(name)}")

    def stop(self) -> None:
        """End all services and whatever they started."""
        for sign, patience in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0)):
            for process in self._running.values():
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, sign)
            deadline = time.monotonic() + patience
            for process in self._running.values():
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.1, deadline - time.monotonic()))
        self._running.clear()

    def __enter__(self) -> Services:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _launch(self, name: str, *command: str) -> None:
        self._commands[name] = command
        with (self.logs / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _run(self, name: str, *command: str) -> None:
        self._launch(name, *command)
        status = self._running[name].wait()
        if status != 0:
            raise SaturnError(f"`{' '.join(command)}` failed:\n{self._tail(name)}")
        del self._running[name]

    def _wait(self, name: str, url: str, deadline: float) -> None:
        while time.monotonic() < deadline:
            self.check()
            with suppress(httpx.TransportError):
                if httpx.get(url, timeout=2, trust_env=False).is_success:
                    return
            time.sleep(0.3)
        raise SaturnError(f"{name} did not answer at {url} in time:\n{self._tail(name)}")

    def _tail(self, name: str, lines: int = 30) -> str:
        text = (self.logs / f"{name}.log").read_text(errors="replace").splitlines()
        return "\n".join(text[-lines:])


def airflow_settings(state: Path, dags: Path, url: str) -> dict[str, str]:
    """The environment of a small Airflow whose state is in ``state``; nobody has to log in."""
    home = state / "airflow"
    settings = {
        "CORE__EXECUTOR": "LocalExecutor",
        "CORE__LOAD_EXAMPLES": "False",
        "CORE__DAGS_FOLDER": str(dags),
        "CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
        "CORE__EXECUTION_API_SERVER_URL": f"{url}/execution/",
        "CORE__PARALLELISM": "8",
        "API__BASE_URL": url,
        "API_AUTH__JWT_SECRET": secrets.token_hex(32),
        "API__SECRET_KEY": secrets.token_hex(32),
        "DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{home}/airflow.db",
        "DAG_PROCESSOR__REFRESH_INTERVAL": "10",
        "SCHEDULER__SCHEDULER_IDLE_SLEEP_TIME": "0.2",
        "SATURN__HOME": str(state / "jobs"),
        "SATURN__LEASES_FOLDER": str(state / "leases"),
    }
    return {"AIRFLOW_HOME": str(home), **{f"AIRFLOW__{key}": value for key, value in settings.items()}}


def free_port(usual: int) -> int:
    """``usual`` when nobody listens there, else a port the system chooses."""
    for port in (usual, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                probe.bind((HOST, port))
                return int(probe.getsockname()[1])
    raise SaturnError("this machine has no free port")
