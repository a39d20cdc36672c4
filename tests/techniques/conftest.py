"""The worst deviations of the matrices, shown at the end of the run."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Record = Callable[[str, float, float], None]


@pytest.fixture
def record_deviation(record_property: Callable[[str, object], None]) -> Record:
    """Note how far a cell of a matrix is off, in losses and in weights."""
    return lambda matrix, losses, weights: record_property("deviation", [matrix, losses, weights])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    cells: dict[str, list[tuple[float, float]]] = {}
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "deviation":
                matrix, losses, weights = value
                cells.setdefault(matrix, []).append((losses, weights))
    for matrix, worst in cells.items():
        losses, weights = map(max, zip(*worst, strict=True))
        terminalreporter.write_line(
            f"{matrix}: {len(worst)} cells, worst deviation "
            f"{losses:.1e} in losses and {weights:.1e} in weights"
        )
