"""References are checked without importing what they name."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from saturn_airflow import InvalidSweepError
from saturn_airflow.model.references import check, load


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "zoo").mkdir()
    (tmp_path / "zoo" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (tmp_path / "zoo" / "models.py").write_text(
        "raise RuntimeError('imported')\nfrom x import y as renamed\nif True:\n    def gpt2(): ...\nVIT = 3\n"
    )
    (tmp_path / "zoo" / "lazy.py").write_text("def __getattr__(name): ...\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("name", ["zoo.models:gpt2", "zoo.models:VIT", "zoo.models:renamed", "zoo.lazy:any"])
def test_what_exists_passes_without_being_run(name: str) -> None:
    check(name, "job 'a': load_model")
    assert "zoo" not in sys.modules


def test_folders_without_init_are_packages_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "zoo" / "large" / "old").mkdir(parents=True)
    for folder in ("zoo/large", "zoo/large/old"):
        (tmp_path / folder / "models.py").write_text("def gpt2(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    check("zoo.large.models:gpt2", "job 'a': load_model")
    check("zoo.large.old.models:gpt2", "job 'a': load_model")
    with pytest.raises(InvalidSweepError, match=r"there is no module 'zoo\.small\.models'"):
        check("zoo.small.models:gpt2", "job 'a': load_model")
    assert "zoo" not in sys.modules


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("zoo.models:gpt3", "job 'a': load_model: module 'zoo.models' has no 'gpt3'"),
        ("zoo.model:gpt2", "job 'a': load_model: there is no module 'zoo.model'"),
        ("zooo.models:gpt2", "job 'a': load_model: there is no module 'zooo.models'"),
        ("zoo.models.gpt2:x", "there is no module 'zoo.models.gpt2'"),
    ],
)
def test_what_does_not_exist_is_named(name: Any, message: Any) -> None:
    with pytest.raises(InvalidSweepError) as caught:
        check(name, "job 'a': load_model")
    assert message in str(caught.value)


def test_the_optimizer_of_torch_is_found_without_torch() -> None:
    before = "torch" in sys.modules
    check("torch.optim:AdamW", "hparams: optimizer")
    assert ("torch" in sys.modules) == before
    with pytest.raises(InvalidSweepError, match="has no 'AdamX'"):
        check("torch.optim:AdamX", "hparams: optimizer")


def test_loading() -> None:
    assert str(load("packaging.version:Version")("1.0")) == "1.0"
    with pytest.raises(InvalidSweepError, match="has no 'Versoin'"):
        load("packaging.version:Versoin")
    with pytest.raises(InvalidSweepError, match="no module 'jsn'"):
        load("jsn:dumps")
