"""What workers import before they fork must be safe to fork."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

LOOK = """
import gc, json, os, sys, threading
from types import SimpleNamespace
from celery.signals import celeryd_after_setup
import saturn_airflow.deployment.preload
queues = SimpleNamespace(consume_from={sys.argv[1]: None})
worker = SimpleNamespace(app=SimpleNamespace(amqp=SimpleNamespace(queues=queues)))
celeryd_after_setup.send(sender="gpu-a@here", instance=worker)
asked = ["torch", "numba", "highspy", "pyomo.environ"]
asked += ["airflow.dag_processing.dagbag", "mlflow", "saturn_airflow.operators.round_train"]
names = [name for name in asked if name in sys.modules]
planned = True
if "numba" in names and not os.fork():
    from saturn_airflow.model.problem import Problem
    from saturn_airflow.planning import solve
    plan = solve(Problem.from_dict(json.loads(sys.argv[2])), time_limit=300)
    os._exit(plan.gap > 1e-6)
if "numba" in names:
    planned = os.waitstatus_to_exitcode(os.wait()[1]) == 0
shared = gc.get_freeze_count() > 10 * len(gc.get_objects())
print(json.dumps({"names": names, "threads": threading.active_count(), "shared": shared, "planned": planned}))
"""

PROBLEM = (Path(__file__).parents[2] / "benchmarks" / "instances" / "txt-2x8.json").read_text()


@pytest.mark.parametrize(
    ("queue", "planning"), [("saturn.gpu-a", []), ("default", ["numba", "highspy", "pyomo.environ"])]
)
def test_workers_import_what_their_tasks_need_but_not_torch_and_no_thread_of_python_is_left(
    tmp_path: Path, queue: str, planning: list[str]
) -> None:
    found = subprocess.run(
        [sys.executable, "-c", LOOK, queue, PROBLEM],
        env={"AIRFLOW_HOME": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    for_all = ["airflow.dag_processing.dagbag", "mlflow", "saturn_airflow.operators.round_train"]
    assert json.loads(found.stdout.splitlines()[-1]) == {
        "names": [*planning, *for_all],
        "threads": 1,
        "shared": True,
        "planned": True,
    }
