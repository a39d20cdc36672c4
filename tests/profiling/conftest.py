from __future__ import annotations

import pytest
from laws import TECHNIQUES, register

from saturn_airflow import library


@pytest.fixture(autouse=True)
def laws(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library of these tests."""
    monkeypatch.setattr(library, "_registered", {})
    register()
    assert set(TECHNIQUES) <= set(library.names())
