"""What holds for all tests."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

# Two parts of the suite at a time leave no core idle: threads of OpenMP would spend them on waiting for each
# other. Ranks get the number that Saturn gives.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Importing Airflow writes a configuration into its home.
os.environ["AIRFLOW_HOME"] = tempfile.mkdtemp(prefix="saturn-tests-airflow-")
# What the tests' models and functions import costs a rank up to three seconds of a core: once, in
# the server that ranks are forked from.
MODELS = ("GPT2LMHeadModel", "LlamaForCausalLM", "ViTForImageClassification")
os.environ["SATURN_WARM_IMPORTS"] = ",".join(
    ["pytest", "hypothesis", *(f"transformers:{model}" for model in MODELS)]
)
# What jobs of the tests read besides SATURN_*. Each value of these is another server that ranks are forked
# from, which takes seconds to start.
os.environ["SATURN_PASS_ENVIRONMENT"] = "SMALL_JOBS_*"
with suppress(ImportError):  # the tests of GPUs run where it may lack
    from hypothesis import HealthCheck, settings

    # On a busy machine anything takes long at times.
    settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("untimed")

Figure = Callable[[str], None]


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Figure:
    """Show a line at the end of the run: what a test measured."""
    return lambda line: record_property("figure", line)


class SmallDisk:
    """A disk of its own with 8 MB, mounted at ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._filler = path / "filler"

    def fill(self) -> None:
        """Leave no room on it."""
        with suppress(OSError), open(self._filler, "ab", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)

    def free(self) -> None:
        """Take away what filled it."""
        self._filler.unlink()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a disk is not allowed here")
    yield SmallDisk(path)
    subprocess.run(["umount", "-l", path], check=True)


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The inodes of what this process has brought to a disk since."""
    found: set[int] = set()
    really = os.fsync

    def fsync(file: int) -> None:
        found.add(os.fstat(file).st_ino)
        really(file)

    monkeypatch.setattr(os, "fsync", fsync)
    return found


@pytest.fixture(scope="session")
def wheel_bin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``bin`` of an environment with a wheel built from the repository, and this one's other packages."""
    folder = tmp_path_factory.mktemp("wheel")
    root = Path(__file__).parents[1]
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(root)]
    subprocess.run(build, check=True, capture_output=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    commands = folder / "venv" / "bin"
    (wheel,) = folder.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", str(commands / "python"), "install"]
    subprocess.run([*pip, "--quiet", "--no-deps", str(wheel)], check=True)
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    # The editable installation of the repository is not among them: its .pth is not read from there.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    for name in ("airflow", "mlflow", "gunicorn", "uvicorn"):
        script = Path(sys.executable).parent / name
        if script.exists():
            _, _, rest = script.read_text().partition("\n")
            (commands / name).write_text(f"#!{commands / 'python'}\n{rest}")
            (commands / name).chmod(0o755)
    return commands


def pytest_collection_finish() -> None:
    """Look no more for garbage among all that was imported: each Trainer looks through all of it."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in terminalreporter.getreports("passed"):
        for name, line in report.user_properties:
            if name == "figure":
                terminalreporter.write_line(f"{report.nodeid}: {line}")
