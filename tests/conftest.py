"""What holds for all tests."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable

import pytest

# Importing Airflow writes a configuration into its home.
os.environ["AIRFLOW_HOME"] = tempfile.mkdtemp(prefix="saturn-tests-airflow-")

Figure = Callable[[str], None]


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Figure:
    """Show a line at the end of the run: what a test measured."""
    return lambda line: record_property("figure", line)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Deal the tests out to xdist's processes: what starts services first and to one, else file by file.

    Services mostly wait, so the other process has a core for the ranks meanwhile.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    items.sort(key=lambda item: item.get_closest_marker("services") is None)
    for item in items:
        services = item.get_closest_marker("services") is not None
        item.add_marker(pytest.mark.xdist_group("services" if services else str(item.path)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in terminalreporter.getreports("passed"):
        for name, line in report.user_properties:
            if name == "figure":
                terminalreporter.write_line(f"{report.nodeid}: {line}")
