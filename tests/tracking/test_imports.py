from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


def run(code: str, **env: str) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**clean, **env},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_importing_tracking_imports_nothing_heavy() -> None:
    code = """
import sys, saturn_airflow.tracking
heavy = {"mlflow", "matplotlib", "numpy", "pandas", "torch", "airflow", "requests", "sqlalchemy"}
print(sorted(heavy & set(sys.modules)))
"""
    assert run(code) == "[]"


def test_short_timeouts_are_set_for_this_process_and_not_in_its_environment() -> None:
    code = """
import os
before = dict(os.environ)
from saturn_airflow.tracking import server
server.import_mlflow()
from mlflow import environment_variables as settings
from mlflow.telemetry.client import get_telemetry_client
print(dict(os.environ) == before)
print(settings.MLFLOW_HTTP_REQUEST_TIMEOUT.get(), settings.MLFLOW_HTTP_REQUEST_MAX_RETRIES.get())
print(get_telemetry_client())
with server.uploading():
    print(settings.MLFLOW_HTTP_REQUEST_TIMEOUT.get())
"""
    assert run(code).splitlines() == ["True", "10 0", "None", "300"]


def test_what_the_user_sets_counts() -> None:
    code = """
from saturn_airflow.tracking import server
server.import_mlflow()
from mlflow import environment_variables as settings
print(settings.MLFLOW_HTTP_REQUEST_TIMEOUT.get(), settings.MLFLOW_HTTP_REQUEST_MAX_RETRIES.get())
"""
    assert run(code, MLFLOW_HTTP_REQUEST_TIMEOUT="77", MLFLOW_HTTP_REQUEST_MAX_RETRIES="3") == "77 3"
