"""The library: where techniques are found, and what is said of those that can't be used."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from running import USERLAND

from saturn_airflow import library
from saturn_airflow.library import BaseTechnique
from saturn_airflow.model.cluster import Cluster, Node
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.folders import TECHNIQUES_VARIABLE
from saturn_airflow.model.jobs import Job
from saturn_airflow.profiling.trials import strategies


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the user's techniques."""
    monkeypatch.setenv(TECHNIQUES_VARIABLE, str(tmp_path))
    monkeypatch.setattr(library, "_registered", {})
    return tmp_path


def write(path: Path, name: str = "Mine", more: str = "") -> None:
    path.write_text(
        f"from saturn_airflow import BaseTechnique\nclass {name}(BaseTechnique):\n    version = '7'\n{more}"
    )


def test_the_techniques_that_come_with_saturn_are_there() -> None:
    assert {"ddp", "fsdp", "single"} <= set(library.names())
    for name in library.names():
        assert library.get(name).name == name


def test_a_file_dropped_into_the_folder_is_in_the_library(folder: Path) -> None:
    assert "mine" not in library.names()
    write(folder / "mine.py")
    write(folder / "_helper.py")
    assert "mine" in library.names()
    assert "_helper" not in library.names()
    assert library.get("mine").name == "mine"
    assert library.get("mine").version.startswith("7 ")


def test_a_file_that_was_edited_is_another_version(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what the guard said of it before would stand for what it does now."""
    versions = []
    for number, more in enumerate(["", "    wrong = True\n", ""]):
        own = folder / str(number)
        own.mkdir()
        monkeypatch.setenv(TECHNIQUES_VARIABLE, str(own))
        write(own / "mine.py", more=more)
        versions.append(library.get("mine").version)
    assert versions[0] == versions[2] != versions[1]
    assert library.get("ddp").version == BaseTechnique.version, "Saturn's own count by Saturn's version"


def test_the_users_file_goes_before_saturns(folder: Path) -> None:
    write(folder / "ddp.py")
    assert library.get("ddp").version.startswith("7 ")


def test_registering(folder: Path) -> None:
    class Mine(BaseTechnique):
        pass

    library.register("mine", Mine)
    assert isinstance(library.get("mine"), Mine)
    with pytest.raises(InvalidSweepError, match="'mine': 3 is not a subclass of BaseTechnique"):
        library.register("mine", 3)  # type: ignore[arg-type]


def test_entry_points(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = folder / "site" / "other_package"
    package.mkdir(parents=True)
    write(package / "__init__.py")
    info = folder / "site" / "other_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: other-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[saturn_airflow.techniques]\nfrom_package = other_package:Mine\nbroken = other_package:Absent\n"
    )
    monkeypatch.syspath_prepend(str(folder / "site"))
    assert "from_package" in library.names()
    assert library.get("from_package").version == "7"
    with pytest.raises(InvalidSweepError, match="technique 'broken': other_package:Absent can't be loaded"):
        library.get("broken")


def test_a_technique_that_is_not_there(folder: Path) -> None:
    told = rf"'ddq' is not in the library; it has ddp, fsdp.*techniques_folder \(here: {folder}\)"
    with pytest.raises(InvalidSweepError, match=told):
        library.get("ddq")
    with pytest.raises(InvalidSweepError, match="job 'x': technique 'ddq' is not in the library; it has ddp"):
        library.check_names(["ddp", "ddq"], "job 'x'")


def test_a_file_that_is_no_technique(folder: Path) -> None:
    write(folder / "two.py", more="class Other(BaseTechnique):\n    pass\n")
    with pytest.raises(InvalidSweepError, match=r"two\.py defines 2 techniques; .* exactly one"):
        library.get("two")
    (folder / "none.py").write_text("from saturn_airflow import BaseTechnique\n")
    with pytest.raises(InvalidSweepError, match=r"none\.py defines 0 techniques"):
        library.get("none")


def test_a_technique_may_derive_from_another(folder: Path) -> None:
    write(folder / "mine.py", more="class _Base(BaseTechnique):\n    pass\n")
    assert library.get("mine").version.startswith("7 ")


def test_a_technique_with_nothing_in_it_says_so() -> None:
    class Empty(BaseTechnique):
        pass

    library.register("empty", Empty)
    technique: Any = library.get("empty")
    with pytest.raises(NotImplementedError, match="'empty' has neither parallelize nor search and execute"):
        technique.parallelize(None, None)


def test_names_are_known_without_importing_anything() -> None:
    code = (
        "import sys; from saturn_airflow import library; print(library.names());"
        "assert not {'torch', 'numpy', 'mlflow', 'pyomo', 'pandas'} & set(sys.modules)"
    )
    environment = {"PATH": "", TECHNIQUES_VARIABLE: str(USERLAND / "techniques")}
    found = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(library.__file__).parent.parent,
        check=True,
    )
    assert "no_import" in found.stdout
    assert "ddp" in found.stdout


def test_a_technique_of_ones_own_is_tried_where_it_is_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "from saturn_airflow import BaseTechnique\n\n\nclass Mine(BaseTechnique):\n    "
    (tmp_path / "silent.py").write_text(body + "version = '1'\n")
    says = "def why_not(self, job, devices):\n        return None if job.name == 'a' else 'not for me'\n"
    (tmp_path / "says.py").write_text(body + says)
    monkeypatch.setenv("SATURN_TECHNIQUES_FOLDER", str(tmp_path))
    jobs = [Job(name, load_model="m:m", load_dataloader="m:d", data_args={"of": name}) for name in "ab"]
    cluster = Cluster(Node("local", devices=1, kind="cpu"))

    def tried(jobs: list[Job], techniques: list[str] | None = None) -> set[tuple[str, str]]:
        found, refusals = strategies(jobs, cluster, techniques)
        if techniques is None:
            assert any("techniques= name it" in r.reason for r in refusals if r.technique == "silent")
        return {(name, key.technique) for key, asker in found.items() for name in asker.jobs}

    found = tried(jobs)
    assert ("a", "single") in found
    assert ("a", "says") in found
    assert not found & {("b", "says"), ("a", "silent"), ("b", "silent")}
    assert tried(jobs, ["silent"]) == {("a", "silent"), ("b", "silent")}
    named = [dataclasses.replace(jobs[0], techniques=["silent"]), jobs[1]]
    assert {pair for pair in tried(named) if pair[1] == "silent"} == {("a", "silent")}
