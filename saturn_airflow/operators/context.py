"""What an Airflow task of a sweep learns from its context and from the configuration."""

from __future__ import annotations

import logging
import os
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from airflow.sdk import BaseHook, Context, TaskInstanceState, conf
from airflow.sdk.exceptions import AirflowFailException, AirflowNotFoundException, AirflowSkipException

from saturn_airflow.launch import environment
from saturn_airflow.model import allowed_modules, formats, sizes
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.folders import OF_SWEEPS, TECHNIQUES_VARIABLE, slug
from saturn_airflow.model.outcomes import OUTCOME, Outcome
from saturn_airflow.model.settings import MLFLOW_CONNECTION
from saturn_airflow.model.sharing import SharingRules
from saturn_airflow.model.teams import Teams
from saturn_airflow.operators.airflow_internals import redact
from saturn_airflow.operators.code_version import code_version
from saturn_airflow.operators.private_folder import close_to_others
from saturn_airflow.operators.retrying import TryAgainError

#: States of a task that was cleared, which has ended before those that ask for them begin; None is one.
_CLEARED = (
    None,
    TaskInstanceState.SCHEDULED,
    TaskInstanceState.QUEUED,
    TaskInstanceState.RUNNING,
    TaskInstanceState.RESTARTING,
    TaskInstanceState.UP_FOR_RETRY,
)
#: About as long as the first task of a sweep takes.
_SECONDS_OF_TRIALS = 10.0

log = logging.getLogger(__name__)


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
        limit_users_code()
        close_to_others(home())
        ti = context["ti"]
        folder = home() / "sweeps" / slug(ti.dag_id) / slug(ti.run_id) / slug(group_id)
        return cls(ti.dag_id, ti.run_id, group_id, folder)

    @property
    def key(self) -> str:
        """What no other sweep has."""
        return f"{self.dag_id}/{self.run_id}/{self.group_id}"

    def job_folder(self, job: str) -> Path:
        """Where one job keeps its checkpoints and progress."""
        return self.folder / slug(job, OF_SWEEPS)

    def tags(self, context: Context) -> dict[str, str]:
        """Tags that lead from an MLflow run back to Airflow."""
        ti = context["ti"]
        tags = {"airflow.dag_id": self.dag_id, "airflow.run_id": self.run_id, "airflow.task_id": ti.task_id}
        base = conf.get("api", "base_url", fallback="")
        if base:
            tags["airflow.url"] = f"{base.rstrip('/')}/dags/{self.dag_id}/runs/{self.run_id}"
        return {**tags, **code_version(context)}


def home() -> Path:
    """The folder of Saturn's state (``[saturn] home``)."""
    default = Path(os.environ.get("AIRFLOW_HOME", "~/airflow")).expanduser() / "saturn"
    return Path(conf.get("saturn", "home", fallback="") or default)


def leases_folder() -> str:
    """The folder of the device locks of this machine (``[saturn] leases_folder``)."""
    from saturn_airflow.launch import leases

    return conf.get("saturn", "leases_folder", fallback="") or str(leases.default_folder())


def outlive_seconds() -> float:
    """How long training goes on when no task follows it (``[saturn] outlive_seconds``), in seconds."""
    return float(conf.getfloat("saturn", "outlive_seconds", fallback=1800.0))


def job_memory() -> str:
    """How much of this machine's memory a job may use (``[saturn] job_memory``).

    :raises AirflowFailException: when that is no amount.
    """
    from saturn_airflow.launch import host_memory

    allowed = conf.get("saturn", "job_memory", fallback="") or host_memory.DEFAULT
    try:
        sizes.bytes_of(allowed, host_memory.SETTING, whole=1.0)
    except InvalidSweepError as error:
        raise AirflowFailException(str(error)) from None
    return allowed


def deployed_teams() -> Teams:
    """The teams of the deployment (``[saturn] shares`` and ``[saturn] priorities``).

    :raises InvalidSweepError: when they are written wrongly.
    """
    shares, priorities = (conf.get("saturn", name, fallback="") or "" for name in ("shares", "priorities"))
    return Teams.parse(shares, priorities)


def sharing_rules() -> SharingRules:
    """The rules by which sweeps of the deployment take turns; without shares where these are written wrongly,
    which whoever plans is told."""
    try:
        return SharingRules(shares=deployed_teams().shares)
    except InvalidSweepError as error:
        log.error("%s; no team has a share until it is set right", error)
        return SharingRules()


def technique_folders() -> tuple[str, ...]:
    """Folders of the user's own techniques (``[saturn] techniques_folder``)."""
    value = conf.get("saturn", "techniques_folder", fallback="") or ""
    return tuple(part for part in value.split(os.pathsep) if part)


def use_techniques_folder() -> None:
    """Let the library of this process see the user's own techniques."""
    if configured := technique_folders():
        os.environ[TECHNIQUES_VARIABLE] = os.pathsep.join(configured)


def limit_users_code() -> None:
    """Let jobs, in this process and in those it starts, import and see only what the configuration says."""
    if configured := conf.get("saturn", "allowed_modules", fallback=""):
        allowed_modules.parse(configured)
        os.environ[allowed_modules.VARIABLE] = configured
    if configured := conf.get("saturn", "pass_environment", fallback=""):
        os.environ[environment.VARIABLE] = configured


def user_path() -> tuple[str, ...]:
    """The entries of ``sys.path`` that a fresh interpreter would not have: DAG bundles, plugins, config."""
    stdlib = Path(os.__file__).parent
    paths = sysconfig.get_paths()
    own = {stdlib, stdlib / "lib-dynload", Path(paths["purelib"]), Path(paths["platlib"])}
    own.add(Path(sys.executable).parent)
    entries = [entry for entry in dict.fromkeys(sys.path) if entry and not entry.endswith(".zip")]
    return tuple(entry for entry in entries if Path(entry) not in own)


def mlflow_uri(conn_id: str = MLFLOW_CONNECTION) -> str:
    """The tracking URI: that of an Airflow connection, MLflow's own setting, or a local store.

    The connection's host may be a whole URL; its login and password go into MLflow's own environment
    variables, so that no credential is written anywhere.

    Links to its runs are by ``[saturn] mlflow_url`` from then on, where that is set and ``conn_id`` is the
    default one.

    :param conn_id: the connection; only the default one may be missing.
    :raises InvalidSweepError: when there is no such connection, or it has no host.
    """
    from saturn_airflow import tracking
    from saturn_airflow.tracking.server import SHOWN_VARIABLE

    shown = conf.get("saturn", "mlflow_url", fallback="") if conn_id == MLFLOW_CONNECTION else ""
    if shown:
        os.environ[SHOWN_VARIABLE] = shown
    else:
        os.environ.pop(SHOWN_VARIABLE, None)
    try:
        connection = BaseHook.get_connection(conn_id)
    except AirflowNotFoundException:
        if conn_id != MLFLOW_CONNECTION:
            raise InvalidSweepError(
                f"mlflow_conn_id is {conn_id!r}, and Airflow has no such connection: add it"
            ) from None
        return tracking.resolve_uri(str(home()))
    if not connection.host:
        raise InvalidSweepError(f"the connection {conn_id!r} has no host; give MLflow's address")
    if connection.login:
        os.environ["MLFLOW_TRACKING_USERNAME"] = connection.login
        os.environ["MLFLOW_TRACKING_PASSWORD"] = connection.password or ""
    return tracking_address(connection.conn_type, connection.host, connection.schema, connection.port)


def tracking_address(conn_type: str | None, host: str, schema: str | None, port: int | None) -> str:
    """MLflow's address as the fields of a connection give it; ``host`` may be a whole URL.

    The scheme stands in the host, in the schema, or is the connection's type, as in
    ``https://user:password@mlflow.example.com``.
    """
    if "://" not in host:
        schemes = [name for name in (schema, conn_type) if name in ("http", "https")]
        host = f"{schemes[0] if schemes else 'http'}://{host}"
    parts = urlsplit(host)
    if port and parts.port is None:
        parts = parts._replace(netloc=f"{parts.netloc}:{port}")
    return urlunsplit(parts)


def pull_all(context: Context, task_ids: list[str], key: str, attempt: float) -> list[Any]:
    """What the (mapped) tasks pushed under ``key``, in this ``attempt`` at what made them.

    When a task upstream is cleared and maps anew, Airflow keeps what instances pushed that are no longer
    there; the attempt tells them apart.
    """
    values = context["ti"].xcom_pull(task_ids=task_ids, key=key)
    found = [value for value in values or [] if value is not None and value["attempt"] == attempt]
    for value in found:
        readable(value, f"an {key}")
    return found


def readable(value: Mapping[str, Any], what: str) -> None:
    """Check that this version can read what another task handed on.

    :raises AirflowFailException: when a newer version wrote it in a way that this one can't read.
    """
    try:
        formats.check(value, what, f"what another task handed on ({value.get('job') or 'of this sweep'})")
    except formats.NewerFormatError as error:
        raise AirflowFailException(str(error)) from None


def outcome_of(data: Mapping[str, Any]) -> Outcome:
    """The outcome that a train task handed on.

    :raises AirflowFailException: when a newer version wrote it in a way that this one can't read.
    """
    readable(data, OUTCOME)
    return Outcome.from_dict(data)


def pull_from_trials(context: Context, trials_task: str, key: str) -> Any:
    """What the sweep's first task pushed under ``key``.

    :raises AirflowSkipException: when that task was skipped, as in a branch that was not taken.
    :raises AirflowFailException: when it failed.
    :raises TryAgainError: while it runs again, since it was cleared alone.
    """
    ti = context["ti"]
    value = ti.xcom_pull(task_ids=trials_task, key=key, map_indexes=-1)
    if value is not None:
        return value
    states = ti.get_task_states(dag_id=ti.dag_id, task_ids=[trials_task], run_ids=[ti.run_id])
    found = states.get(ti.run_id, {})
    state = found.get(trials_task)
    if state == TaskInstanceState.SKIPPED:
        raise AirflowSkipException(f"{trials_task} was skipped")
    if trials_task in found and state in _CLEARED:
        raise TryAgainError(f"{trials_task} was cleared, and runs again", _SECONDS_OF_TRIALS)
    if state == TaskInstanceState.SUCCESS:
        # It may have ended just now.
        value = ti.xcom_pull(task_ids=trials_task, key=key, map_indexes=-1)
        if value is not None:
            return value
        raise AirflowFailException(
            f"{trials_task} succeeded, but what it handed on ({key}) is gone: the XComs of this DAG run were "
            "deleted, as by `airflow db clean`. Clear the whole DAG run: jobs that had not finished go on "
            "from their last checkpoint"
        )
    raise AirflowFailException(f"{trials_task} did not succeed; its log says why")


def hide_secrets(params: Mapping[str, str]) -> dict[str, str]:
    """``params`` without the values of keys that Airflow takes for secrets, such as ``data.password``."""
    return {key: str(redact(value, key.rpartition(".")[2])) for key, value in params.items()}


#: Postgres hands back floats of this size as whole numbers, and larger ones fit in no message of Airflow's.
_LARGEST = 2.0**63


def finite(value: Any) -> Any:
    """``value`` with None for numbers that XComs refuse: those that JSON lacks (NaN, infinity), and those
    that come back as whole numbers of more than 64 bits, such as the loss of a job that diverges.
    """
    if isinstance(value, float):
        return value if abs(value) < _LARGEST else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value
