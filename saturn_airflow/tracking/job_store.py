"""MLflow as a job's own code sees it: whatever it logs goes to the job's run, and no other run begins.

MLflow need not be there: what is logged becomes events of the training
(:mod:`saturn_airflow.launch.job_log`), which whoever follows the training sends on as it does the losses.
"""

from __future__ import annotations

import functools
import getpass
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlflow
from mlflow import ActiveRun
from mlflow.entities import (
    Experiment,
    LifecycleStage,
    Metric,
    Param,
    Run,
    RunData,
    RunInfo,
    RunStatus,
    RunTag,
)
from mlflow.exceptions import MlflowException
from mlflow.store.artifact.artifact_repository_registry import _artifact_repository_registry
from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository
from mlflow.store.tracking.abstract_store import AbstractStore
from mlflow.tracking import fluent
from mlflow.tracking._tracking_service.utils import _tracking_store_registry

from saturn_airflow.launch import job_log
from saturn_airflow.tracking import server
from saturn_airflow.tracking.outbox import now

#: What the job's code finds as the id of its run and of its experiment; MLflow knows them by others.
RUN_ID = "the-run-of-the-job"
_SCHEME = "saturn-job"
_READS = ("get_", "search_", "list_", "batch_get_", "find_", "calculate_", "supports_")


def install() -> None:
    """Have MLflow report here, in this process; calls of Saturn's own go where they always do."""
    registry: Any = _tracking_store_registry
    if getattr(registry, "_of_a_job", False):
        return
    registry._of_a_job = True
    elsewhere = registry.get_store
    stores: dict[Any, JobStore] = {}

    def get_store(store_uri: str | None = None, artifact_uri: str | None = None) -> Any:
        reach = functools.partial(elsewhere, store_uri, artifact_uri)
        if server.is_asking():
            return reach()
        return stores.setdefault((store_uri, artifact_uri), JobStore(reach))

    registry.get_store = get_store
    files: Any = _artifact_repository_registry
    files.register(_SCHEME, JobArtifacts)
    started = fluent.active_run

    @functools.wraps(started)
    def active_run() -> Any:
        return started() or _ActiveRun(_the_run())

    mlflow.active_run = fluent.active_run = active_run


class _Logged:
    """What the job's code has logged so far in this process."""

    def __init__(self) -> None:
        self.began = now()
        self.metrics: dict[str, Metric] = {}
        self.params: dict[str, str] = {}
        self.tags: dict[str, str] = {}
        self.warned: set[str] = set()


_logged = _Logged()
# MLflow's own classes are typed here and there.
_Store: Any = AbstractStore
_Files: Any = LocalArtifactRepository
_ActiveRun: Any = ActiveRun


class JobStore(_Store):  # type: ignore[misc]
    """A tracking store that has one run: the job's.

    :param elsewhere: gives the store that other runs and experiments are read from.
    """

    def __init__(self, elsewhere: Callable[[], Any]) -> None:
        super().__init__()
        self._elsewhere = elsewhere

    def create_run(
        self, experiment_id: str, user_id: str, start_time: int, tags: Sequence[RunTag], run_name: str
    ) -> Run:
        """The job's run, whatever it is to be called."""
        self.log_batch(RUN_ID, [], [], [tag for tag in tags if not tag.key.startswith("mlflow.")])
        self.log_batch(RUN_ID, [], [], [tag for tag in tags if tag.key == "mlflow.note.content"])
        return _the_run()

    def get_run(self, run_id: str) -> Run:
        """The job's run, or another one that is read."""
        return _the_run() if run_id == RUN_ID else self._elsewhere().get_run(run_id)

    def get_metric_history(self, run_id: str, metric_key: str, *paging: Any, **named: Any) -> Any:
        """Of the job's run no more than the last value is known here."""
        if run_id != RUN_ID:
            return self._elsewhere().get_metric_history(run_id, metric_key, *paging, **named)
        last = _logged.metrics.get(metric_key)
        return [last] if last is not None else []

    def update_run_info(self, run_id: str, run_status: str, end_time: int, run_name: str) -> RunInfo:
        """How the job's run ends, and what it is called, is not for the job's code to say."""
        _check_run(run_id)
        return _the_run().info

    def log_batch(
        self, run_id: str, metrics: Sequence[Metric], params: Sequence[Param], tags: Sequence[RunTag]
    ) -> None:
        """Log to the job's run."""
        _check_run(run_id)
        _logged.metrics.update({metric.key: metric for metric in metrics})
        _logged.params.update({param.key: str(param.value) for param in params})
        _logged.tags.update({tag.key: str(tag.value) for tag in tags})
        told: dict[str, Any] = {}
        if params:
            told["params"] = {param.key: str(param.value) for param in params}
        if tags:
            told["tags"] = {tag.key: str(tag.value) for tag in tags}
        if metrics or told:
            job_log.put([(m.key, float(m.value), int(m.timestamp), int(m.step)) for m in metrics], **told)

    def set_tag(self, run_id: str, tag: RunTag) -> None:
        """Tag the job's run."""
        self.log_batch(run_id, [], [], [tag])

    def get_experiment(self, experiment_id: str) -> Experiment:
        """The experiment of the job's run, or another one that is read."""
        if experiment_id in (RUN_ID, "0"):
            return _experiment(RUN_ID)
        found: Experiment = self._elsewhere().get_experiment(experiment_id)
        return found

    def get_experiment_by_name(self, experiment_name: str) -> Experiment:
        """The experiment of the job's run, under the name it is asked for."""
        return _experiment(experiment_name)

    def create_experiment(self, name: str, artifact_location: Any = None, tags: Any = None) -> str:
        """The id of the experiment that the job's run is in."""
        return RUN_ID

    def create_logged_model(self, *args: Any, **named: Any) -> Any:
        """Refused: a job's model is logged when it has finished."""
        raise MlflowException.invalid_parameter_value(
            "log_model can't be used in a job's code: Saturn logs the finished model of the job by itself, "
            "as the artifact 'model' of its run. Leave it out, or log files with mlflow.log_artifact"
        )


def _read(name: str) -> Callable[..., Any]:
    """A method that passes a read on to the store elsewhere."""

    def read(self: JobStore, *args: Any, **named: Any) -> Any:
        return getattr(self._elsewhere(), name)(*args, **named)

    return read


def _not_passed_on(name: str) -> Callable[..., None]:
    """A method that does nothing, and warns of that once."""

    def leave_out(self: JobStore, *args: Any, **named: Any) -> None:
        if name not in _logged.warned:
            _logged.warned.add(name)
            job_log.warn(
                f"MLflow's {name} in a job's code is not passed on; metrics, parameters, tags and files are"
            )

    return leave_out


def _add_what_stores_have() -> None:
    """Give :class:`JobStore` what MLflow's stores have besides: reads are passed on, the rest is not."""
    for name, value in vars(AbstractStore).items():
        known = name.startswith("_") or name in vars(JobStore) or not callable(value)
        if known or name.endswith("_async") or "async_logging" in name:
            continue
        if name not in ("log_metric", "log_param"):  # which come down to log_batch
            setattr(JobStore, name, (_read if name.startswith(_READS) else _not_passed_on)(name))


_add_what_stores_have()


class JobArtifacts(_Files):  # type: ignore[misc]
    """Files that a job's code logs: copied beside its checkpoints, and sent on from there."""

    def __init__(self, artifact_uri: str, *args: Any, **named: Any) -> None:
        # Where nothing is logged, nothing is there to be read.
        folder = job_log.folder() or Path("/nonexistent")
        super().__init__(folder.absolute().as_uri(), *args, **named)

    def log_artifact(self, local_file: str, artifact_path: str | None = None) -> None:
        """Log a file."""
        if job_log.folder() is not None:
            super().log_artifact(local_file, artifact_path)
            self._tell(Path(local_file).name, artifact_path)

    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Log what a folder holds."""
        if job_log.folder() is not None:
            super().log_artifacts(local_dir, artifact_path)
            for path in sorted(Path(local_dir).iterdir()):
                self._tell(path.name, artifact_path)

    def _tell(self, name: str, artifact_path: str | None) -> None:
        to = artifact_path or ""
        at = Path(self.artifact_dir, to, name)
        job_log.put(artifact=str(at), to=f"{to}/{name}".strip("/") if at.is_dir() else to)


def _the_run() -> Run:
    info = RunInfo(
        run_id=RUN_ID,
        experiment_id=RUN_ID,
        user_id=getpass.getuser(),
        status=RunStatus.to_string(RunStatus.RUNNING),
        start_time=_logged.began,
        end_time=None,
        lifecycle_stage=LifecycleStage.ACTIVE,
        artifact_uri=f"{_SCHEME}:/logged",
    )
    params = [Param(key, value) for key, value in _logged.params.items()]
    tags = [RunTag(key, value) for key, value in _logged.tags.items()]
    return Run(info, RunData(list(_logged.metrics.values()), params, tags))


def _experiment(name: str) -> Experiment:
    return Experiment(RUN_ID, name, f"{_SCHEME}:/logged", LifecycleStage.ACTIVE)


def _check_run(run_id: str) -> None:
    if run_id != RUN_ID:
        raise MlflowException.invalid_parameter_value(
            f"a job's code logs to the run of its job; run {run_id!r} is another one. Leave the run's id out"
        )
