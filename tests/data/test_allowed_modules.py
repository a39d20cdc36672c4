"""Which modules references may name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from saturn_airflow.model import allowed_modules, references
from saturn_airflow.model.errors import InvalidSweepError


@pytest.fixture(autouse=True)
def _beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(allowed_modules.VARIABLE, raising=False)
    (tmp_path / "its_functions.py").write_text(
        "from torch import load\nfrom saturn_airflow.deployment.local import _feed as feed\n"
        "from os import system\nfrom subprocess import run\nfrom functools import lru_cache, partial, wraps\n"
        "eval = eval\ndef make(): return 1\n@lru_cache\ndef cached(): ...\nhalf = partial(make)\n"
        "@wraps(make)\ndef wrapped(): ...\nclass Model: ...\n"
    )
    (tmp_path / "antigravity_models.py").write_text("imported = True\ndef model(): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize(
    "reference",
    ["os:system", "builtins:exec", "subprocess:run", "os.path:join", "runpy:run_path", "posix:system"],
)
def test_the_standard_library_is_not_loaded(reference: str) -> None:
    with pytest.raises(InvalidSweepError, match="Python's standard library, which jobs can't name"):
        references.load(reference)


@pytest.mark.parametrize("name", ["system", "run", "eval", "partial"])
def test_nor_under_the_name_of_another_module(name: str) -> None:
    with pytest.raises(InvalidSweepError, match="Python's standard library, which jobs can't name"):
        references.load(f"its_functions:{name}")


@pytest.mark.parametrize("name", ["make", "cached", "half", "wrapped", "Model"])
def test_what_its_helpers_made_is_the_users_own(name: str) -> None:
    assert references.load(f"its_functions:{name}") is not None


@pytest.mark.parametrize(
    "reference", ["torch.optim:AdamW", "torch.nn.functional:cross_entropy", "math_of_mine:f"]
)
def test_libraries_are_as_they_were(reference: str, tmp_path: Path) -> None:
    (tmp_path / "math_of_mine.py").write_text("def f(): ...")
    assert references.load(reference) is not None


def test_a_module_of_the_users_may_have_a_name_of_the_standard_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "turtledemo").mkdir()
    (tmp_path / "turtledemo" / "models.py").write_text("def model(): ...")
    (tmp_path / "turtledemo" / "__init__.py").touch()
    monkeypatch.delitem(sys.modules, "turtledemo", raising=False)
    assert references.load("turtledemo.models:model") is not None


def test_only_what_is_configured_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(allowed_modules.VARIABLE, "its_functions, statistics")
    assert references.load("its_functions:make")() == 1
    assert references.load("statistics:mean") is not None
    assert references.load("torch.optim:SGD") is not None
    with pytest.raises(InvalidSweepError, match="'antigravity_models' is not among"):
        references.load("antigravity_models:model")
    assert "antigravity_models" not in sys.modules
    with pytest.raises(InvalidSweepError, match="is not among"):
        references.load("its_functions_too:make")
    with pytest.raises(InvalidSweepError, match="standard library"):
        references.load("its_functions:system")
    with pytest.raises(
        InvalidSweepError, match=r"it is torch.serialization.load, and module .* is not among"
    ):
        references.load("its_functions:load")
    monkeypatch.setenv(allowed_modules.VARIABLE, "its_functions, torch")
    assert references.load("its_functions:load") is not None


def test_what_an_argument_allows_is_all_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(allowed_modules.VARIABLE, "its_functions, torch, functools")
    assert references.load("its_functions:make", ["its_functions"])() == 1
    for name in ("load", "lru_cache"):
        with pytest.raises(InvalidSweepError, match=r"standard library|is not among"):
            references.load(f"its_functions:{name}", ["its_functions"])


@pytest.mark.parametrize(
    "reference",
    ["saturn_airflow.deployment.local:_feed", "saturn_airflow:Job", "its_functions:feed"],
)
def test_jobs_can_not_name_functions_of_this_package(reference: str) -> None:
    with pytest.raises(InvalidSweepError, match="Saturn's own"):
        references.load(reference)


@pytest.mark.parametrize("text", ["shop;transformers", "shop/models", "*"])
def test_a_setting_that_names_no_modules(text: str) -> None:
    with pytest.raises(InvalidSweepError, match="allowed_modules has"):
        allowed_modules.parse(text)
