"""Which version of the DAG's code a sweep ran with."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from airflow.sdk import Context

_PATIENCE = 10.0  # seconds: a repository may lie on a slow share
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def code_version(context: Context) -> dict[str, str]:
    """Tags that name the git commit of the task's DAG bundle, as MLflow's UI shows it; empty without one.

    A bundle with versions, such as Airflow's ``GitDagBundle``, says its own; of a plain folder, git is asked.
    """
    bundle = getattr(context["ti"], "bundle_instance", None)
    if bundle is None:
        return {}
    version = bundle.version or bundle.get_current_version()
    if version is None:
        return commit_of(Path(bundle.path))
    tags = {"airflow.bundle_version": str(version)}
    return {**tags, "mlflow.source.git.commit": str(version)} if _COMMIT.fullmatch(str(version)) else tags


def commit_of(folder: Path) -> dict[str, str]:
    """The commit that is checked out in ``folder``, and whether its files were changed since."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=64", "--exclude", "*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=False)
    except (OSError, subprocess.TimeoutExpired):  # no git here, or one that does not answer
        return {}
    commit, _, dirty = done.stdout.strip().partition("-")
    if done.returncode or not _COMMIT.fullmatch(commit):
        return {}
    return {"mlflow.source.git.commit": commit, "mlflow.source.git.dirty": "true" if dirty else "false"}
