"""Which version of a DAG's code git tells: that of the DAGs folder, not of what lies beside it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from saturn_airflow.operators.code_version import as_text, commit_of


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """With a folder of DAGs, and one of something else."""
    for name in ("dags/a.py", "docs/a.md"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("first\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "first")
    return tmp_path


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(folder), *words], check=True)


def test_a_change_beside_the_dags_is_no_change_of_them(repository: Path) -> None:
    dags = repository / "dags"
    clean = commit_of(dags)
    assert clean["mlflow.source.git.dirty"] == "false"
    (repository / "docs/a.md").write_text("second\n")
    assert commit_of(dags) == clean, "jobs of cleared tasks would be trained from the beginning"


def test_changes_that_are_not_committed_are_told_apart(repository: Path) -> None:
    dags = repository / "dags"
    seen = {as_text(commit_of(dags))}
    for text in ("second\n", "third\n"):
        (dags / "a.py").write_text(text)
        assert commit_of(dags)["mlflow.source.git.dirty"] == "true"
        seen.add(as_text(commit_of(dags)))
    assert len(seen) == 3
    (dags / "a.py").write_text("first\n")
    assert as_text(commit_of(dags)) in seen


def test_changes_that_git_can_not_show_are_changes(repository: Path) -> None:
    """As in a clone without files' last versions, while the server that has them is away."""
    found = subprocess.check_output(["git", "-C", str(repository), "rev-parse", "HEAD:dags/a.py"], text=True)
    (repository / ".git" / "objects" / found[:2] / found[2:].strip()).unlink()
    (repository / "dags/a.py").write_text("second\n")
    assert commit_of(repository / "dags")["mlflow.source.git.dirty"] == "true"


def test_a_folder_outside_of_git_has_no_version(tmp_path: Path) -> None:
    assert commit_of(tmp_path) == {}
