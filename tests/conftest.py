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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in terminalreporter.getreports("passed"):
        for name, line in report.user_properties:
            if name == "figure":
                terminalreporter.write_line(f"{report.nodeid}: {line}")
