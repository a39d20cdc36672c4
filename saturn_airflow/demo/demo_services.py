"""Airflow and MLflow as local processes that listen on 127.0.0.1 only and end when they are told to."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import httpx

from saturn_airflow.deployment.processes import HOST, free_port
from saturn_airflow.deployment.services import LocalServices
from saturn_airflow.model.errors import SaturnError

#: A DAG's first run by its schedule, up to a tenth of its interval late, would come before the demo's own.
NO_SCHEDULE = {"AIRFLOW__SCHEDULER__USE_JOB_SCHEDULE": "False"}

#: Airflow's ``airflow_local_settings.py``: LocalExecutor's tasks are forks of the scheduler, which imports
#: once what each would. (Celery's worker has :mod:`saturn_airflow.deployment.preload`.)
_LOCAL_SETTINGS = """\
import sys

if "scheduler" in sys.argv:
    # Each task would import it anew, for a second of one core.
    from saturn_airflow.deployment import task_imports

    task_imports.import_all(plans=True)
"""


class Services(LocalServices):
    """MLflow and a small Airflow (SQLite, LocalExecutor), which nobody has to log in to.

    :param state: the folder; made when it is not there.
    :param dags: the DAGs folder.
    :param settings: what is added to, or replaced in, the environment of every service.
    """

    login = None

    def __init__(self, state: Path, dags: Path, settings: Mapping[str, str] | None = None) -> None:
        super().__init__(state)
        self.airflow_url = f"http://{HOST}:{free_port(8080)}"
        self.mlflow_url = f"http://{HOST}:{free_port(5000)}"
        self.environment = {
            **os.environ,
            **airflow_settings(self.state, dags.resolve(), self.airflow_url),
            **NO_SCHEDULE,
            "MLFLOW_TRACKING_URI": self.mlflow_url,
            # Seven processes of a quarter of a GB each, for what only traces of language models need.
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            **(settings or {}),
        }

    @property
    def home(self) -> Path:
        """The folder of checkpoints and progress of jobs."""
        return self.state / "jobs"

    def start(self, timeout: float = 300.0) -> None:
        """Start everything and wait until it answers.

        :raises SaturnError: when something ends by itself, or does not answer within ``timeout`` seconds.
        """
        # Databases and logs are in it.
        self.state.mkdir(mode=0o700, parents=True, exist_ok=True)
        store = f"sqlite:///{self.state}/mlflow.db"
        artifacts = str(self.state / "mlflow-artifacts")
        port = self.mlflow_url.rsplit(":", 1)[1]
        self._launch(
            "mlflow",
            *("mlflow", "server", "--host", HOST, "--port", port, "--workers", "1"),
            # Plain files, so that models can be loaded without the server, too.
            *("--backend-store-uri", store, "--no-serve-artifacts", "--default-artifact-root", artifacts),
        )
        settings = self.state / "airflow" / "config" / "airflow_local_settings.py"
        settings.parent.mkdir(parents=True, exist_ok=True)
        settings.write_text(_LOCAL_SETTINGS)
        self._launch("airflow-migrate", "airflow", "db", "migrate")
        self.processes.finish("airflow-migrate")
        port = self.airflow_url.rsplit(":", 1)[1]
        self._launch("airflow-api", "airflow", "api-server", "--host", HOST, "--port", port, "--workers", "1")
        self._launch("airflow-dags", "airflow", "dag-processor")
        self._launch("airflow-scheduler", "airflow", "scheduler", "--skip-serve-logs")
        deadline = time.monotonic() + timeout
        self._wait("mlflow", f"{self.mlflow_url}/health", deadline)
        self._wait("airflow-api", f"{self.airflow_url}/api/v2/version", deadline)

    def kill(self, name: str) -> None:
        """End one service at once, as a fault would; :meth:`start_again` starts it again."""
        self.processes.kill(name)

    def start_again(self, name: str) -> None:
        """Start a service again that was killed."""
        self.processes.start_again(name)

    def _launch(self, name: str, *command: str) -> None:
        self.processes.launch(name, command, self.environment)

    def _wait(self, name: str, url: str, deadline: float) -> None:
        while time.monotonic() < deadline:
            self.check()
            with suppress(httpx.TransportError):
                if httpx.get(url, timeout=2, trust_env=False).is_success:
                    return
            time.sleep(0.3)
        raise SaturnError(f"{name} did not answer at {url} in time:\n{self.processes.tail(name)}")


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
        # A file that has changed is read at the next refresh; the others need not be read again so soon.
        "DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "300",
        "SATURN__HOME": str(state / "jobs"),
        "SATURN__TECHNIQUES_FOLDER": str(dags / "shop" / "techniques"),
        "SATURN__LEASES_FOLDER": str(state / "leases"),
    }
    return {"AIRFLOW_HOME": str(home), **{f"AIRFLOW__{key}": value for key, value in settings.items()}}
