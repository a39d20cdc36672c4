"""What sweeps tell Airflow's own metrics, as it arrives where they are sent: StatsD and OpenTelemetry."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

# Begins as Airflow's process of a task does.
TASK = """
from airflow.sdk.observability.metrics import stats_utils
from airflow.sdk._shared.observability.metrics import stats
stats.initialize(factory=stats_utils.get_stats_factory(), export_legacy_names=True)
from saturn_airflow.operators.numbers_for_airflow import LeaseWait, tell_of_sweep
waits = LeaseWait({"dag_id": "nightly", "node": "gpu-a"})
for event in ({"event": "waiting", "time": 10.0}, {"event": "leased", "time": 12.5}):
    waits.hear(event)
result = {"failed": ["a", "b"], "utilisation": 0.75, "planned_seconds": 10.0, "actual_seconds": 12.5}
tell_of_sweep(result, {"dag_id": "nightly", "task_group": "sweep"})
"""


def _task(folder: Path, settings: Mapping[str, str]) -> None:
    environment = {**os.environ, "AIRFLOW_HOME": str(folder)}
    environment |= {f"AIRFLOW__METRICS__{name.upper()}": value for name, value in settings.items()}
    environment |= {name: value for name, value in settings.items() if name.startswith("OTEL_")}
    subprocess.run([sys.executable, "-c", TASK], env=environment, check=True)


def test_over_statsd(tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        server.settimeout(30)
        port = str(server.getsockname()[1])
        _task(tmp_path, {"statsd_on": "True", "statsd_host": "127.0.0.1", "statsd_port": port})
        said: list[str] = []
        while len(said) < 4:  # Airflow has numbers of its own
            said += [line for line in [server.recv(1000).decode()] if line.startswith("airflow.saturn.")]
    assert sorted(said) == [
        "airflow.saturn.devices_busy:0.75|g",
        "airflow.saturn.jobs_failed:2.0|g",
        "airflow.saturn.lease_wait:2500.000000|ms",
        "airflow.saturn.plan_error:0.25|g",
    ]


def test_over_opentelemetry(tmp_path: Path) -> None:
    service = pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")
    bodies: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        port = str(server.server_address[1])
        _task(tmp_path, {"otel_on": "True", "otel_host": "127.0.0.1", "otel_port": port})
    finally:
        server.shutdown()
        server.server_close()
    found = {}
    for body in bodies:
        for resource in service.ExportMetricsServiceRequest.FromString(body).resource_metrics:
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    points = metric.gauge.data_points or metric.exponential_histogram.data_points
                    (point,) = points
                    tags = {tag.key: tag.value.string_value for tag in point.attributes}
                    value = point.as_double if metric.gauge.data_points else point.sum
                    found[metric.name] = value, tags
    of_sweep = {"dag_id": "nightly", "task_group": "sweep"}
    assert found == {
        "airflow.saturn.lease_wait": (2500.0, {"dag_id": "nightly", "node": "gpu-a"}),
        "airflow.saturn.devices_busy": (0.75, of_sweep),
        "airflow.saturn.jobs_failed": (2.0, of_sweep),
        "airflow.saturn.plan_error": (0.25, of_sweep),
    }
