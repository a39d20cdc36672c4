"""What the machine does while a job trains, as MLflow's system metrics."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from saturn_airflow.launch.devices import as_text
from saturn_airflow.tracking.server import import_mlflow

log = logging.getLogger(__name__)

#: MLflow's own switch and interval; here the metrics are on unless it says otherwise.
SWITCH = "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING"
INTERVAL = "MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL"
#: MLflow's UI shows metrics of this prefix apart from the others, under "System metrics".
PREFIX = "system/"
#: Between two samples, where MLflow's setting does not say.
_SECONDS = 10.0


def is_wanted() -> bool:
    """Whether system metrics are to be logged."""
    return os.environ.get(SWITCH, "true").strip().lower() not in ("false", "0", "no")


class MachineMetrics:
    """Reads the machine's metrics from a thread of its own, with MLflow's monitors.

    :param report: called with the number of the sample and its metrics.
    :param gpus: UUIDs of the GPUs whose metrics count; those of others are left out.
    :param first: the number of the first sample.
    :param seconds: between two samples (default: MLflow's setting, else 10).
    """

    def __init__(
        self,
        report: Callable[[int, Mapping[str, float]], None],
        gpus: Collection[str],
        first: int = 0,
        seconds: float | None = None,
    ) -> None:
        self._report = report
        self._gpus = frozenset(gpus)
        self._number = first
        self._seconds = seconds if seconds is not None else _configured_seconds()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="saturn-machine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Take no more samples."""
        self._stopping.set()

    def _work(self) -> None:
        try:
            import_mlflow()
            monitors = [*_monitors(), *([_gpu_monitor(self._gpus)] if self._gpus else [])]
            while not self._stopping.wait(self._seconds):
                values: dict[str, float] = {}
                for monitor in monitors:
                    monitor.collect_metrics()
                    values.update(monitor.aggregate_metrics())
                    monitor.clear_metrics()
                self._report(self._number, {f"{PREFIX}{key}": value for key, value in values.items()})
                self._number += 1
        except Exception as error:  # no metric of the machine is worth a training
            log.warning("The machine's metrics can't be read (%s); MLflow will not have them", error)


def _monitors() -> list[Any]:
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
    from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

    kinds: list[Any] = [CPUMonitor, DiskMonitor, NetworkMonitor]
    return [kind() for kind in kinds]


def _gpu_monitor(uuids: Collection[str]) -> Any:
    """MLflow's monitor, told of these GPUs alone: they are gpu_0, gpu_1... in their order on the machine."""
    import pynvml
    from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor

    kind: Any = GPUMonitor
    monitor = kind()
    monitor.gpu_handles = [h for h in monitor.gpu_handles if as_text(pynvml.nvmlDeviceGetUUID(h)) in uuids]
    monitor.num_gpus = len(monitor.gpu_handles)
    return monitor


def _configured_seconds() -> float:
    with contextlib.suppress(KeyError, ValueError):
        if (seconds := float(os.environ[INTERVAL])) > 0:
            return seconds
    return _SECONDS


def is_fresh(moment: float | None) -> bool:
    """Whether something that happened at ``moment`` (seconds since the epoch) happens about now."""
    return moment is None or time.time() - moment < _SECONDS
