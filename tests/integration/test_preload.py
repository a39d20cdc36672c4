"""What workers import before they fork must be safe to fork."""

import json
import subprocess
import sys
from pathlib import Path

LOOK = """
import gc, json, sys, threading
from celery.signals import celeryd_after_setup
import saturn_airflow.deployment.preload
celeryd_after_setup.send(sender="gpu-a@here", instance=None)
asked = ("torch", "numba", "mlflow", "saturn_airflow.operators.round_train")
names = [name for name in asked if name in sys.modules]
shared = gc.get_freeze_count() > 10 * len(gc.get_objects())
print(json.dumps({"names": names, "threads": threading.active_count(), "shared": shared}))
"""


def test_workers_import_mlflow_but_not_torch_and_no_thread_of_python_is_left(tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-c", LOOK],
        env={"AIRFLOW_HOME": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(found.stdout.splitlines()[-1]) == {
        "names": ["mlflow", "saturn_airflow.operators.round_train"],
        "threads": 1,
        "shared": True,
    }
