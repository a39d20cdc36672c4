"""A trained model carries its code: it loads and serves without the repository and this package."""

from __future__ import annotations

import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from pathlib import Path

import pytest
import torch

from saturn_airflow import tracking
from saturn_airflow.model.jobs import Job
from saturn_airflow.training import exports, model_code

pytestmark = pytest.mark.slow

FILES = {
    "acme/__init__.py": "",
    "acme/models.py": "import json\nfrom pathlib import Path\nfrom . import layers\n"
    "import acme_helpers as helpers\n"
    "def model(width):\n"
    "    assert json.loads((Path(__file__).parent / 'labels.json').read_text()) == ['a']\n"
    "    return layers.Scaled(width, helpers.START)\n",
    "acme/layers.py": "import torch\nimport yaml\nclass Scaled(torch.nn.Module):\n"
    "    def __init__(self, width, start):\n"
    "        super().__init__()\n        self.weight = torch.nn.Parameter(torch.full((width,), start))\n"
    "    def forward(self, x):\n        return {'logits': x * self.weight}\n",
    "acme/training_only.py": "import airflow\n",
    "acme/labels.json": '["a"]',
    "acme/.env": "SECRET=1",
    "acme_helpers.py": "START = 2.0\n",
    "acme_unused.py": "",
}
PREDICTS = """
import sys

class Absent:  # what the machine that serves does not have
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] == 'saturn_airflow':
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
import mlflow, numpy
mlflow.set_tracking_uri(sys.argv[1])
model = mlflow.pyfunc.load_model(sys.argv[2])
print(model.predict({'x': numpy.ones((1, 3), dtype=numpy.float32)})['logits'].tolist())
print('saturn_airflow' in sys.modules, sys.modules['acme'].__file__)
"""


@pytest.fixture
def shipped(embedded_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a model in MLflow whose repository is gone."""
    repository = tmp_path / "repository"
    for name, text in FILES.items():
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_text(text)
    monkeypatch.syspath_prepend(repository)
    exported = tmp_path / "exported"
    monkeypatch.setattr(exports, "read_weights", lambda path: {"weight": torch.tensor([1.0, 2.0, 3.0])})
    job = Job("a", "acme.models:model", "acme.data:data", model_args={"width": 3})
    exports.export_model("checkpoint", job, exported)
    tags = {"saturn.sweep": f"dag/{uuid.uuid4()}/sweep"}
    sweep = tracking.open_sweep(embedded_uri, "shipped", "sweep", tags, {}, tmp_path / "sweep", 0)
    run = tracking.open_job(embedded_uri, sweep, "a", {}, {}, tmp_path / "a")
    run.wait(30)
    inputs = [{"name": "x", "dtype": "float32", "shape": [-1, 3]}]
    run.follow({"event": "end", "status": "finished", "result": {"inputs": inputs}})
    address = run.log_model_folder(exported)
    assert run.close()
    assert address
    repository.rename(tmp_path / "gone")
    return address


def elsewhere(folder: Path) -> dict[str, str]:
    """The environment of a process that finds installed packages alone."""
    return {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ} | {"TMPDIR": str(folder)}


def test_it_loads_without_the_repository_and_without_this_package(
    embedded_uri: str, shipped: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-I", "-c", PREDICTS, embedded_uri, shipped]
    done = subprocess.run(command, env=elsewhere(tmp_path), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    predicted, modules = done.stdout.strip().splitlines()[-2:]
    assert json.loads(predicted) == [[1.0, 2.0, 3.0]]
    assert modules.startswith("False ")
    assert "/code/acme/" in modules

    code = tmp_path / "exported" / "code"
    found = {str(path.relative_to(code)) for path in code.rglob("*") if path.is_file()}
    assert found == {*FILES, "saturn_model.py"} - {"acme/.env", "acme_unused.py"}
    needed = (tmp_path / "exported" / "requirements.txt").read_text().split()
    assert [line.partition("==")[0] for line in needed] == ["PyYAML", "numpy", "safetensors", "torch"]
    assert f"torch=={torch.__version__.partition('+')[0]}" in needed


@pytest.mark.services
def test_mlflow_serves_it(embedded_uri: str, shipped: str, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "models", "serve", "-m", shipped, "--env-manager", "local"]
    command += ["--port", str(port), "--workers", "1"]
    environment = elsewhere(tmp_path) | {
        "MLFLOW_TRACKING_URI": embedded_uri,
        "MLFLOW_DISABLE_TELEMETRY": "true",
        # It looks for uvicorn on the path.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    with (tmp_path / "serve.log").open("wb") as log:
        server = subprocess.Popen(
            command, env=environment, cwd=tmp_path, stdout=log, stderr=log, start_new_session=True
        )
    try:
        asked = urllib.request.Request(
            f"http://127.0.0.1:{port}/invocations",
            json.dumps({"inputs": {"x": [[1.0, 1.0, 2.0]]}}).encode(),
            {"Content-Type": "application/json"},
        )
        deadline = time.monotonic() + 240
        while True:
            try:
                with urllib.request.urlopen(asked, timeout=10) as answer:
                    assert json.load(answer)["predictions"]["logits"] == [[1.0, 2.0, 6.0]]
                return
            except urllib.error.HTTPError as error:
                raise AssertionError(error.read()) from error
            except OSError:
                assert server.poll() is None, (tmp_path / "serve.log").read_text()
                assert time.monotonic() < deadline, (tmp_path / "serve.log").read_text()
                time.sleep(0.5)
    finally:
        os.killpg(server.pid, 15)
        server.wait(30)


def test_requirements_are_those_that_python_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    known = importlib.metadata.packages_distributions()
    looked_through: list[bool] = []

    def look_through() -> dict[str, list[str]]:
        looked_through.append(True)
        return dict(known)

    monkeypatch.setattr(importlib.metadata, "packages_distributions", look_through)
    model_code._distributions.cache_clear()
    assert all(model_code._distribution_of(top) == top for top in ("numpy", "safetensors", "torch"))
    assert not looked_through, "it takes a quarter of a second, at the end of each training"
    of_one = {top: distributions[0] for top, distributions in known.items() if len(set(distributions)) == 1}
    assert {top: model_code._distribution_of(top) for top in of_one} == of_one
    assert len(looked_through) == 1


def test_an_installed_package_is_a_requirement_and_not_carried(tmp_path: Path) -> None:
    needed = model_code.carry("transformers:AutoModel", tmp_path / "code")
    assert [line for line in needed if line.startswith("transformers==")]
    assert list((tmp_path / "code").iterdir()) == []
