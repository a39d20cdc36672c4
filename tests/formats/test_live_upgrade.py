"""A run that the first version's code started, with this one's beside it: the package was upgraded meanwhile.

``benchmarks/upgrade.py`` does it with whole sweeps, on a running deployment.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from saturn_airflow.launch import progress, runs

ROOT = Path(__file__).parents[2]
USERLAND = ROOT / "tests" / "training" / "userland"
SPEC = Path(__file__).parent / "files" / "aa7f206" / "job" / "runs" / "0001" / "spec.json"
pytestmark = pytest.mark.ranks

STARTS = """
import json, sys
from saturn_airflow.training import runs
run = runs.start(runs.RunSpec.from_dict(json.load(sys.stdin)))
print(run.folder)
"""


def releases() -> ModuleType:
    found = importlib.util.spec_from_file_location("releases", ROOT / "benchmarks" / "releases.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The code of the first version."""
    try:
        return Path(releases().lay_out(tmp_path_factory.mktemp("first") / "code", "0.0.1", "aa7f206"))
    except LookupError as error:
        pytest.skip(str(error))


def test_a_run_of_the_first_version_is_followed_stopped_and_gone_on_with(first: Path, tmp_path: Path) -> None:
    job = tmp_path / "job"
    asked = json.loads(SPEC.read_text())
    asked |= {"folder": str(job), "path": [str(USERLAND)], "leases_folder": str(tmp_path / "leases")}
    asked |= {"batch_count": None, "outlive_seconds": 60.0}
    asked["job"] |= {"loss_function": "small_jobs:slow"}
    asked["job"]["hparams"] |= {"batches": 3000}
    old = {**os.environ, "PYTHONPATH": str(first)}
    started = subprocess.run(
        [sys.executable, "-c", STARTS],
        input=json.dumps(asked),
        env=old,
        cwd=first,
        text=True,
        capture_output=True,
        check=True,
    )
    run = runs.attach(job)
    assert run is not None, "it trains, and nobody else may"
    assert str(run.folder) == started.stdout.strip()
    assert run.spec.job.name == "small"
    assert "format" not in json.loads((run.folder / "spec.json").read_text()), "it is the first version's"
    for event in run.events():
        if event["event"] == "step" and event["step"] > 3:
            run.stop(60.0)
    assert run.end is not None
    assert run.end["status"] == "stopped"
    stopped = progress.of(job).steps
    assert stopped > 3
    again = runs.start(run.spec)
    for event in again.events():
        if event["event"] == "step" and event["step"] > stopped + 3:
            again.stop(60.0)
    steps = [e["step"] for e in again.so_far() if e["event"] == "step"]
    assert steps[0] == stopped + 1, "it goes on where the first version stopped"
