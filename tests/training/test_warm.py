"""What is imported ahead of time for a job."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from saturn_airflow.launch import warm

SOURCE = """
import os, numpy.linalg
from torch import nn
from . import sibling
from mymodels import thing
raise RuntimeError("this module must not be imported")

def model():
    from transformers import ViTConfig, ViTModel as V
    if True:
        import scipy

def other():
    import pandas
"""


@pytest.fixture
def variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("SATURN_WARM_IMPORTS", "")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "SATURN_WARM_IMPORTS"


def test_harmless_libraries_that_a_job_imports(tmp_path: Path, variable: str) -> None:
    (tmp_path / "my_shop_models.py").write_text(SOURCE)
    (tmp_path / "my_shop").mkdir()
    (tmp_path / "my_shop" / "__init__.py").touch()
    (tmp_path / "my_shop" / "data.py").write_text("import datasets")
    (tmp_path / "my_shop" / "broken.py").write_text("import import")
    warm.prepare(
        ["my_shop_models:model", "my_shop.data:load", "my_shop.broken:f", "my_shop.gone:f", "gone:f", None]
    )
    assert os.environ[variable].split(",") == [
        "numpy.linalg",
        "torch:nn",
        "transformers:ViTConfig",
        "transformers:ViTModel",
        "scipy",
        "datasets",
    ]
    assert "my_shop_models" not in sys.modules


def test_what_cannot_be_imported_is_left_for_later(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "a_module_that_is_not_there,torch:no_such_name,json")
    monkeypatch.delitem(sys.modules, "json")
    warm.import_all()
    assert "json" in sys.modules
