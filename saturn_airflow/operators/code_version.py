"""Which version of the DAG's code a sweep ran with."""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from airflow.sdk import Context

_PATIENCE = 10.0  # seconds: a repository may lie on a slow share
#: The tag that tells changes which are not committed from others.
CHANGES = "saturn.code_changes"
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
    """The commit that is checked out in ``folder``, and whether files in it were changed since."""
    said = _git(folder, "describe", "--always", "--dirty", "--abbrev=64", "--exclude", "*") or b""
    commit, _, dirty = said.decode().strip().partition("-")
    if not _COMMIT.fullmatch(commit):
        return {}
    # What is changed elsewhere in the repository is no change of these files.
    changes = _digest_of_changes(folder) if dirty else None
    tags = {"mlflow.source.git.commit": commit, "mlflow.source.git.dirty": "true" if changes else "false"}
    return {**tags, CHANGES: changes} if changes else tags


def as_text(tags: Mapping[str, str]) -> str | None:
    """The version that these tags name, as one text; None where they name none."""
    version = tags.get("airflow.bundle_version") or tags.get("mlflow.source.git.commit")
    return f"{version}+{tags[CHANGES]}" if version and CHANGES in tags else version


def _digest_of_changes(folder: Path) -> str | None:
    """What tells the changed files of a folder from other changes, None where there are none; files that git
    does not know are not seen."""
    changes = _git(folder, "diff", "--no-ext-diff", "HEAD", "--", ".")
    if changes is None:  # as in a clone that lacks a file's last version
        return "unknown"
    return hashlib.sha256(changes).hexdigest()[:16] if changes else None


def _git(folder: Path, *arguments: str) -> bytes | None:
    """What git says; None where it is not here, does not answer or fails."""
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_PATIENCE, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout
