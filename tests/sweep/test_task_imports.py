"""What workers import before they fork is what tasks would import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow]

TASK = """
import sys
from saturn_airflow.deployment import task_imports

task_imports.import_all(plans=False)
before = set(sys.modules)

from airflow.sdk import DAG
from saturn_airflow import Cluster, HParams, Job, Node, SaturnSweepOperator
from saturn_airflow.tracking import server

parts = dict.fromkeys(("load_model", "load_dataloader", "loss_function"), "jobs_of_test:load")
with DAG("dag", schedule=None):
    job = Job("job", **parts, hparams=HParams(batches=1))
    SaturnSweepOperator(task_id="sweep", jobs=[job], cluster=Cluster(Node("node", devices=1)))
try:
    server.client("http://127.0.0.1:9").get_experiment_by_name("experiment")
except Exception:
    pass
new = sorted(set(sys.modules) - before)
print(*(name for name in new if name.startswith(("airflow", "mlflow", "saturn_airflow"))))
"""


def test_a_task_imports_nothing_that_its_worker_has_not(tmp_path: Path) -> None:
    """Parsing a sweep, and asking MLflow."""
    (tmp_path / "jobs_of_test.py").write_text("def load(**arguments): ...\n")
    said = subprocess.run(
        [sys.executable, "-c", TASK], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert said.stdout.split() == []
