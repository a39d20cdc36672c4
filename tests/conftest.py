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


def pytest_itemcollected(item: pytest.Item) -> None:
    """Deal the tests out to xdist's processes: those that share services together, else file by file."""
    folder = item.path.parent if item.get_closest_marker("services") else item.path
    item.add_marker(pytest.mark.xdist_group(str(folder)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest where there are several processes: services, which mostly wait."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: item.get_closest_marker("services") is None)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in terminalreporter.getreports("passed"):
        for name, line in report.user_properties:
            if name == "figure":
                terminalreporter.write_line(f"{report.nodeid}: {line}")
