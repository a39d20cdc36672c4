"""A verdict is of the code that it was found for."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

from saturn_airflow import HParams, Job
from saturn_airflow.model import code_digest, guards

NAMED = frozenset({"own_shop.models:net"})
FILES = {
    "own_shop/__init__.py": "",
    "own_shop/models.py": "from . import layers\nimport numpy\ndef net():\n    from own_losses import mean\n",
    "own_shop/layers.py": "WIDTH = 8\n",
    "own_shop/unused.py": "",
    "own_losses.py": "import json, own_numbers.small as small\n\ndef mean():\n    pass\n",
    "own_numbers/small.py": "ONE = 1\n",
    "airflow_dag.py": "import own_shop.models\n",
}


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Modules of a user's own, none of which is imported."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def digest(named: frozenset[str] = NAMED) -> str:
    """As a new process finds it."""
    code_digest._modules.cache_clear()
    code_digest._version.cache_clear()
    return code_digest.of(named)


@pytest.mark.parametrize("name", FILES)
def test_what_the_code_imports_counts_and_nothing_else(shop: Path, name: str) -> None:
    before = digest()
    assert before == digest() != ""
    (shop / name).write_text(FILES[name] + "\n# edited\n")
    assert (digest() != before) == (name not in ("own_shop/unused.py", "airflow_dag.py"))
    assert not {"own_shop", "own_losses"} & sys.modules.keys()


@pytest.mark.parametrize("package", ["numpy", "yaml"])
def test_versions_of_installed_packages_count(
    package: str, shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a distribution is not called as its package is."""
    (shop / "own_shop/layers.py").write_text(f"from {package} import *\n")
    before = digest()
    found = importlib.metadata.version
    upgraded = {"numpy": "numpy", "yaml": "PyYAML"}[package]
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"{found(name)}{name == upgraded}")
    assert digest() != before


def test_code_that_is_not_here_says_nothing(shop: Path) -> None:
    assert digest(frozenset({"nowhere.at_all:net"})) == ""
    (shop / "own_shop/models.py").write_text("no python (")
    assert digest() != ""


def test_a_verdict_is_forgotten_when_the_loss_is_edited(shop: Path) -> None:
    job = Job(
        "a", "own_shop.models:net", "data:load", loss_function="own_losses:mean", hparams=HParams(batches=1)
    )
    code_digest._modules.cache_clear()
    before = guards.mark(job, "1")
    (shop / "own_losses.py").write_text("def mean():\n    return 1\n")
    assert guards.mark(job, "1") == before, "a process looks once"
    code_digest._modules.cache_clear()
    assert guards.mark(job, "1") != before
