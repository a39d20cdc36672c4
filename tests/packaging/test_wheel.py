"""A wheel built from the repository, installed in another environment, has all it needs and no more."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
LOOK = """
import importlib.metadata as metadata, importlib.util, json
from saturn_airflow import library
points = metadata.distribution("saturn-airflow").entry_points
print(json.dumps({
    "names": library.names(),
    "folders": [str(folder) for folder in library.folders()],
    "top_level": importlib.util.find_spec("techniques") is not None,
    "groups": sorted({point.group for point in points}),
    "typed": any(str(file) == "saturn_airflow/py.typed" for file in metadata.files("saturn-airflow")),
}))
"""


def look(python: Path, code: str, cwd: Path, **settings: str) -> str:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "SATURN"))}
    done = subprocess.run(
        [str(python), "-c", code],
        check=True,
        cwd=cwd,
        env={**clean, **settings},
        capture_output=True,
        text=True,
    )
    return done.stdout


def test_the_wheel_brings_its_techniques_and_entry_points(wheel_bin: Path, tmp_path: Path) -> None:
    seen = json.loads(look(wheel_bin / "python", LOOK, tmp_path))
    shipped = sorted(path.stem for path in (ROOT / "techniques").glob("[!_]*.py"))
    assert seen["names"] == shipped
    assert {"single", "ddp", "fsdp"} <= set(shipped)
    assert str(ROOT) not in "".join(seen["folders"])
    assert not seen["top_level"]
    assert seen["groups"] == ["airflow.plugins", "apache_airflow_provider", "console_scripts"]
    assert seen["typed"]


def test_a_folder_of_ones_own_is_found(wheel_bin: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("")
    seen = json.loads(look(wheel_bin / "python", LOOK, tmp_path, SATURN_TECHNIQUES_FOLDER=str(tmp_path)))
    assert "mine" in seen["names"]


def test_the_image_has_all_that_a_wheel_is_built_of_and_a_wheel_no_secrets(tmp_path: Path) -> None:
    """Of what the Dockerfile copies, and nothing else; a clone's docker/ may hold a deployment's secrets."""
    copied = re.findall(r"^COPY (.*) (\S+)$", (ROOT / "docker" / "Dockerfile").read_text(), re.MULTILINE)
    for names, target in copied:
        for name in names.split():
            if (ROOT / name).is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / name, tmp_path / target, ignore=ignored)
            else:
                (tmp_path / target).mkdir(exist_ok=True)
                shutil.copy(ROOT / name, tmp_path / target)
    (tmp_path / "docker").mkdir(exist_ok=True)
    (tmp_path / "docker" / ".env").write_text("REDIS_PASSWORD=mine\n")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", "dist"]
    subprocess.run(build, cwd=tmp_path, check=True, capture_output=True, text=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    files = zipfile.ZipFile(wheel).namelist()
    assert "saturn_airflow/shipped/docker/compose.yaml" in files
    assert not [name for name in files if name.endswith(".env")]
