"""Reaching MLflow: which server or store, a client that gives up soon, and what its errors mean."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import sqlite3
import threading
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit, urlunsplit

from saturn_airflow.model.errors import SaturnError
from saturn_airflow.model.printable import without_login

if TYPE_CHECKING:
    from mlflow import MlflowClient

log = logging.getLogger(__name__)

#: Names MLflow's address as people open it, where that is another than the one it is asked by.
SHOWN_VARIABLE = "SATURN_MLFLOW_URL"
#: Seconds one HTTP request may take, where ``MLFLOW_HTTP_REQUEST_TIMEOUT`` does not say otherwise.
REQUEST_SECONDS = 10
#: The same for requests that carry files.
UPLOAD_SECONDS = 300

# As MLflow tells of a server that can't be reached, or is too slow.
_NO_CONNECTION = re.compile(
    r"API request to (?P<place>https?://[^/\s]+)\S* failed with exception HTTPS?Connection"
)
#: Of a request that was sent again and again, such as of files that its server can't store.
_ERRORS = re.compile(r"too many (\d{3}) error responses")
_import_lock = threading.Lock()
_of_thread = threading.local()


class TrackingError(SaturnError):
    """MLflow could not do what it was asked to."""


class MlflowAwayError(TrackingError):
    """MLflow does not answer, or can't take records at the moment; they may be sent again later."""


class RecordRefusedError(TrackingError):
    """MLflow answered that it will never take this record."""


class RunGoneError(TrackingError):
    """The run was deleted, or belongs to another server."""


def resolve_uri(state_folder: str | Path) -> str:
    """``MLFLOW_TRACKING_URI`` where it is set, else the embedded SQLite store in ``state_folder``.

    The artifacts of an embedded store lie beside it, in ``mlartifacts/``.
    """
    if uri := os.environ.get("MLFLOW_TRACKING_URI"):
        return uri
    return f"sqlite:///{Path(state_folder).expanduser().absolute()}/mlflow.db"


def run_url(uri: str, experiment_id: str, run_id: str) -> str | None:
    """The address of a run's page, as people open it; None where ``uri`` is a store without a server."""
    parts = urlsplit(os.environ.get(SHOWN_VARIABLE) or uri)
    if parts.scheme not in ("http", "https"):
        return None
    host = parts.netloc.rpartition("@")[2]
    base = urlunsplit((parts.scheme, host, parts.path.rstrip("/"), "", ""))
    # Without the rest, MLflow's UI shows the run among traces of language models.
    return f"{base}/#/experiments/{quote(experiment_id)}/runs/{quote(run_id)}?workflowType=machine_learning"


@lru_cache(maxsize=8)
def client(uri: str) -> MlflowClient:
    """A client for the server or store at ``uri``. Imports MLflow, which takes seconds.

    :raises TrackingError: when the store can't be opened, or ``uri`` is not one MLflow knows.
    """
    import_mlflow()
    from mlflow import MlflowClient

    with translated_errors():
        if (database := sqlite_file(uri)) is None:
            return MlflowClient(tracking_uri=uri)
        database.parent.mkdir(parents=True, exist_ok=True)
        # The first to come creates the schema; write-ahead logging lets readers and a writer work at once.
        with locked(database.with_name(database.name + ".lock")):
            with contextlib.closing(sqlite3.connect(database, timeout=60)) as connection:
                connection.execute("PRAGMA journal_mode=WAL")
            return MlflowClient(tracking_uri=uri)


#: Tags of an experiment: its kind, as MLflow's list of experiments shows it.
_TRAINING = {"mlflow.experimentKind": "custom_model_development"}


def experiment_id(uri: str, name: str) -> str:
    """The id of the experiment called ``name``, which is created, or restored, where need be.

    :raises MlflowAwayError: when MLflow does not answer.
    """
    mlflow = client(uri)
    with translated_errors():
        experiment = mlflow.get_experiment_by_name(name)
        if experiment is None:
            try:
                location = _artifact_location(uri, name)
                return str(mlflow.create_experiment(name, artifact_location=location, tags=_TRAINING))
            except Exception as error:
                if getattr(error, "error_code", None) != "RESOURCE_ALREADY_EXISTS":
                    raise
                experiment = mlflow.get_experiment_by_name(name)
                assert experiment is not None
        if experiment.lifecycle_stage == "deleted":
            log.warning("The MLflow experiment %r was deleted; it is restored to take new runs", name)
            mlflow.restore_experiment(experiment.experiment_id)
        return str(experiment.experiment_id)


def all_pages(ask: Callable[[str | None], Any]) -> list[Any]:
    """Everything that MLflow has to a question, of which it answers so many at a time.

    :param ask: asks for the page with the token it is given; None for the first.
    """
    page = ask(None)
    found = list(page)
    while page.token:
        page = ask(page.token)
        found += page
    return found


@contextlib.contextmanager
def translated_errors() -> Iterator[None]:
    """Turn what MLflow raises into one of this module's three errors.

    :raises MlflowAwayError: no answer, or one that may be another the next time.
    :raises RecordRefusedError: MLflow will never take this.
    :raises RunGoneError: there is no such run (any more).
    """
    from mlflow.exceptions import MlflowException

    before, _of_thread.asking = is_asking(), True
    try:
        yield
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST" or "must be in the 'active'" in str(error):
            raise RunGoneError(str(error)) from error
        if error.error_code in ("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "INVALID_STATE"):
            raise RecordRefusedError(str(error)) from error
        raise MlflowAwayError(_first_line(error)) from error
    except (OSError, sqlite3.Error) as error:
        raise MlflowAwayError(_first_line(error)) from error
    except SaturnError:
        raise
    except Exception as error:
        # Artifact stores raise what their own libraries raise; all of it may pass.
        raise MlflowAwayError(f"{type(error).__name__}: {_first_line(error)}") from error
    finally:
        _of_thread.asking = before


#: Its earlier name, for one more release.
answers = translated_errors


def is_asking() -> bool:
    """Whether it is Saturn itself that this thread calls MLflow for, within :func:`translated_errors`."""
    return bool(getattr(_of_thread, "asking", False))


@contextlib.contextmanager
def uploading() -> Iterator[None]:
    """Requests inside may take long: they carry files."""
    from mlflow import environment_variables as settings

    before = settings.MLFLOW_HTTP_REQUEST_TIMEOUT.default
    settings.MLFLOW_HTTP_REQUEST_TIMEOUT.default = UPLOAD_SECONDS
    try:
        yield
    finally:
        settings.MLFLOW_HTTP_REQUEST_TIMEOUT.default = before


def import_mlflow() -> None:
    """Import MLflow with short timeouts and no telemetry, unless the environment says otherwise."""
    with _import_lock:
        # MLflow looks once, while it is imported; the environment is what ranks and user code inherit.
        variable = "MLFLOW_DISABLE_TELEMETRY"
        own = variable not in os.environ
        if own:
            os.environ[variable] = "true"
        try:
            import mlflow  # noqa: F401
            from mlflow import environment_variables as settings
        finally:
            if own:
                del os.environ[variable]
        # Defaults, not the environment. No retries: whoever calls comes back with all that waits.
        settings.MLFLOW_HTTP_REQUEST_TIMEOUT.default = REQUEST_SECONDS
        settings.MLFLOW_HTTP_REQUEST_MAX_RETRIES.default = 0
        # Two lines for each run that ends would fill a task's log.
        settings.MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT.default = True
        settings.MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR.default = False


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the file lock ``path``, waiting for it; the kernel frees it when its holder dies."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def sqlite_file(uri: str) -> Path | None:
    """The file of an SQLite store, or None where ``uri`` is something else."""
    scheme, separator, path = uri.partition(":///")
    if not separator or scheme.partition("+")[0] != "sqlite" or not path:
        return None
    return Path(path.partition("?")[0]).absolute()


def _artifact_location(uri: str, name: str) -> str | None:
    database = sqlite_file(uri)
    if database is None:
        return None
    return (database.parent / "mlartifacts" / quote(name, safe=" ")).as_uri()


def _first_line(error: BaseException) -> str:
    text = without_login(str(error).strip().partition("\n")[0])
    # What requests and urllib3 say of it is long, and its end is all there is to know.
    if found := _NO_CONNECTION.search(text):
        if status := _ERRORS.search(text):
            return f"{found['place']} answers with errors of its own (status {status[1]}), as its log tells"
        return f"no answer from {found['place']}: {_reason(error)}"
    return (text if len(text) <= 300 else f"{text[:300].rpartition(' ')[0]} ...") or type(error).__name__


def _reason(error: BaseException) -> str:
    """What the system said of a connection, beneath what libraries made of it."""
    causes = [error]
    while (next_one := causes[-1].__cause__ or causes[-1].__context__) and next_one not in causes:
        causes.append(next_one)
    for cause in reversed(causes):
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        if isinstance(cause, TimeoutError):
            return "it took too long"
    return "no connection"
