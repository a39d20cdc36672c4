"""What Saturn uses of Airflow beyond its public interface: where it stands, and what if it moves."""

from __future__ import annotations

import ast
import importlib.util
import logging
import selectors
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from weakref import WeakKeyDictionary

import psutil
import pytest
from airflow import plugins_manager
from airflow.sdk.execution_time.supervisor import PsutilTracker, WatchedSubprocess

import saturn_airflow
from saturn_airflow import plugin
from saturn_airflow.operators import airflow_internals
from saturn_airflow.plugin import SaturnPlugin

PACKAGE = Path(saturn_airflow.__file__).parent
INSIDE = ("operators/airflow_internals.py", "plugin/listener_internals.py", "plugin/web_internals.py")
#: Airflow's public interface: https://airflow.apache.org/docs/apache-airflow/stable/public-airflow-interface.html
PUBLIC = ("airflow.sdk", "airflow.sdk.exceptions", "airflow.sdk.types", "airflow.plugins_manager")


def symbols(path: str) -> list[tuple[str, str]]:
    """What a module imports from Airflow: (module, name)."""
    nodes = ast.walk(ast.parse((PACKAGE / path).read_text()))
    found = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module is not None]
    return [(str(n.module), a.name) for n in found if str(n.module).startswith("airflow") for a in n.names]


@pytest.mark.parametrize(("module", "name"), [symbol for path in INSIDE for symbol in symbols(path)])
def test_what_is_used_of_airflow_is_where_it_was(module: str, name: str) -> None:
    found = importlib.import_module(module)
    # What is declared there is set where a task runs; a module of a package is there once it is imported.
    there = hasattr(found, name) or name in getattr(found, "__annotations__", {})
    assert there or importlib.util.find_spec(f"{module}.{name}"), f"{module}.{name} has moved"


@pytest.mark.slow
def test_nothing_else_is_used_of_airflow_than_its_public_interface() -> None:
    paths = (str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))
    used = {(path, *symbol) for path in paths if path not in INSIDE for symbol in symbols(path)}
    assert {use for use in used if use[1] not in PUBLIC} == set()


def test_the_end_of_a_process_whose_sockets_are_closed_is_seen_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = WatchedSubprocess._service_subprocess
    monkeypatch.setattr(WatchedSubprocess, "_service_subprocess", own)
    airflow_internals.see_ends_at_once()
    airflow_internals.see_ends_at_once()
    watched = object.__new__(WatchedSubprocess)
    watched._exit_code, watched._open_sockets = None, WeakKeyDictionary()
    watched.selector, watched._process = (
        selectors.DefaultSelector(),
        PsutilTracker(psutil.Popen(["sleep", "0.1"])),
    )
    began, longest = time.monotonic(), 30.0
    while watched._service_subprocess(max_wait_time=longest) is None:
        pass
    assert time.monotonic() - began < longest / 2
    assert watched._exit_code == 0


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process that has not loaded the pages."""
    for name in ("app", "queries", "overview", "web_internals"):
        monkeypatch.delitem(sys.modules, f"saturn_airflow.plugin.{name}", raising=False)
        monkeypatch.delattr(plugin, name, raising=False)
    plugin._app.cache_clear()
    yield
    plugin._app.cache_clear()


@pytest.mark.parametrize("symbol", symbols("plugin/web_internals.py"), ids=lambda symbol: symbol[1])
def test_pages_that_can_not_be_loaded_are_left_out_with_one_line(
    symbol: tuple[str, str], fresh: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Some are there only once they are asked for, so that there is nothing to delete.
    there = vars(importlib.import_module(symbol[0]))
    without = ModuleType(symbol[0])
    vars(without).update({name: there[name] for name in there.keys() - {symbol[1], "__getattr__"}})
    monkeypatch.setitem(sys.modules, symbol[0], without)
    caplog.set_level(logging.WARNING)
    loaded = SaturnPlugin()
    monkeypatch.setattr(plugins_manager, "_get_plugins", lambda: ([loaded], {}))
    assert plugins_manager.get_fastapi_plugins.__wrapped__() == ([], [])
    assert loaded.external_views == []
    (record,) = [record for record in caplog.records if record.name == "saturn_airflow.plugin"]
    assert symbol[1] in record.getMessage()
    assert "\n" not in record.getMessage()


def test_pages_that_can_be_loaded_show_in_the_ui(fresh: None) -> None:
    loaded = SaturnPlugin()
    assert [app["url_prefix"] for app in loaded.fastapi_apps] == ["/saturn"]
    assert [view["destination"] for view in loaded.external_views] == ["nav", "dag", "dag_run"]
    assert loaded.external_views is loaded.external_views, "Airflow takes views out that it can't use"
