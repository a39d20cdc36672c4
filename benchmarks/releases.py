"""Versions of the package in folders of their own, for services that run different ones."""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
from collections.abc import Iterable
from pathlib import Path

from saturn_airflow.deployment.local import LocalCluster

ROOT = Path(__file__).resolve().parents[1]
#: The last version without numbers in its formats.
FIRST = "aa7f206"
#: The first with them.
NUMBERED = "972013e"
_PARTS = ("saturn_airflow", "techniques")
HEAD_SERVICES = ("airflow", "scheduler", "dag-processor", "triggerer", "worker")
_ENTRY_POINTS = """[apache_airflow_provider]
provider_info = saturn_airflow.provider:get_provider_info

[airflow.plugins]
saturn = saturn_airflow.plugin:SaturnPlugin
"""


def lay_out(folder: Path, version: str, commit: str | None = None) -> Path:
    """Write a version of the package to ``folder``, which is then put on ``PYTHONPATH``.

    :param version: the number it says it has.
    :param commit: whose code it is; None for that of the working tree.
    :raises LookupError: where the commit is not in this clone.
    """
    folder.mkdir(parents=True)
    if commit is None:
        for part in _PARTS:
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        done = subprocess.run(
            ["git", "-C", str(ROOT), "archive", commit, *_PARTS], capture_output=True, check=False
        )
        if done.returncode:
            raise LookupError(f"commit {commit} is not in this clone: {done.stderr.decode().strip()}")
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as files:
            files.extractall(folder, filter="data")
    # Installed packages come later on the path: these are what Python finds.
    info = folder / f"saturn_airflow-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: saturn-airflow\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(_ENTRY_POINTS)
    return folder


class UpgradableCluster(LocalCluster):
    """A cluster whose services run the versions that they were last given.

    :ivar code: the folder of each service's version, by its name; the working tree where it has none.
    """

    code: dict[str, Path]

    def environment(self, name: str) -> dict[str, str]:
        """The environment of a service, with its version."""
        code = getattr(self, "code", {}).get(name)
        return {**super().environment(name), **({"PYTHONPATH": str(code)} if code else {})}

    def upgrade(self, names: Iterable[str], code: Path) -> None:
        """End services at once, and start them again under another version; trainings are left alone."""
        for name in names:
            self.code[name] = code
            if name in self.processes.running():
                self.processes.kill(name)
            self.processes.start_again(name, {"PYTHONPATH": str(code)})
