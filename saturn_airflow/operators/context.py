"""What an Airflow task of a sweep learns from its context and from the configuration."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from airflow.sdk import BaseHook, Context, conf
from airflow.sdk.exceptions import AirflowNotFoundException

from saturn_airflow import library
from saturn_airflow.errors import InvalidSweepError
from saturn_airflow.folders import slug

MLFLOW_CONNECTION = "mlflow_default"


@dataclass(frozen=True)
class SweepContext:
    """Which sweep a task belongs to.

    :param folder: where the sweep keeps what its jobs write: checkpoints and progress.
    """

    dag_id: str
    run_id: str
    group_id: str
    folder: Path

    @classmethod
    def of(cls, context: Context, group_id: str) -> SweepContext:
        """The sweep of the running task."""
        ti = context["ti"]
        folder = home() / "sweeps" / slug(ti.dag_id) / slug(ti.run_id) / slug(group_id)
        return cls(ti.dag_id, ti.run_id, group_id, folder)

    @property
    def key(self) -> str:
        """What no other sweep has."""
        return f"{self.dag_id}/{self.run_id}/{self.group_id}"

    def job_folder(self, job: str) -> Path:
        """Where one job keeps its checkpoints and progress."""
        return self.folder / slug(job)

    def tags(self, context: Context) -> dict[str, str]:
        """Tags that lead from an MLflow run back to Airflow."""
        ti = context["ti"]
        tags = {"airflow.dag_id": self.dag_id, "airflow.run_id": self.run_id, "airflow.task_id": ti.task_id}
        base = conf.get("api", "base_url", fallback="")
        if base:
            tags["airflow.url"] = f"{base.rstrip('/')}/dags/{self.dag_id}/runs/{self.run_id}"
        return tags


def home() -> Path:
    """The folder of Saturn's state (``[saturn] home``)."""
    default = Path(os.environ.get("AIRFLOW_HOME", "~/airflow")).expanduser() / "saturn"
    return Path(conf.get("saturn", "home", fallback="") or default)


def leases_folder() -> str:
    """The folder of the device locks of this machine (``[saturn] leases_folder``)."""
    default = str(Path(tempfile.gettempdir()) / "saturn-leases")
    return conf.get("saturn", "leases_folder", fallback="") or default


def technique_folders() -> tuple[str, ...]:
    """Folders of the user's own techniques (``[saturn] techniques_folder``)."""
    value = conf.get("saturn", "techniques_folder", fallback="") or ""
    return tuple(part for part in value.split(os.pathsep) if part)


def use_techniques_folder() -> None:
    """Let the library of this process see the user's own techniques."""
    if configured := technique_folders():
        os.environ[library.FOLDERS_VARIABLE] = os.pathsep.join(configured)


def user_path() -> tuple[str, ...]:
    """The entries of ``sys.path`` that a fresh interpreter would not have: DAG bundles, plugins, config."""
    own = (str(Path(sys.prefix).resolve()), str(Path(os.__file__).parent))
    entries = [entry for entry in dict.fromkeys(sys.path) if entry and not entry.endswith(".zip")]
    return tuple(entry for entry in entries if not str(Path(entry).resolve()).startswith(own))


def mlflow_uri() -> str:
    """The tracking URI: the Airflow connection ``mlflow_default``, MLflow's own setting, or a local store.

    The connection's host may be a whole URL; its login and password go into MLflow's own environment
    variables, so that no credential is written anywhere.
    """
    from saturn_airflow import tracking

    try:
        connection = BaseHook.get_connection(MLFLOW_CONNECTION)
    except AirflowNotFoundException:
        return tracking.resolve_uri(str(home()))
    host = connection.host or ""
    if not host:
        raise InvalidSweepError(f"the connection {MLFLOW_CONNECTION!r} has no host; give MLflow's address")
    if connection.login:
        os.environ["MLFLOW_TRACKING_USERNAME"] = connection.login
        os.environ["MLFLOW_TRACKING_PASSWORD"] = connection.password or ""
    if "://" not in host:
        host = f"{connection.schema or 'http'}://{host}"
    if connection.port and not re.search(r":\d+$", host):
        host = f"{host}:{connection.port}"
    return host


def pull_all(context: Context, task_ids: list[str], key: str) -> list[Any]:
    """What the (mapped) tasks pushed under ``key``, those that pushed nothing left out."""
    values = context["ti"].xcom_pull(task_ids=task_ids, key=key)
    return [value for value in values or [] if value is not None]
