"""The worst deviations of the matrices, shown at the end of the run."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Record = Callable[[str, float, float], None]
_WORST = pytest.StashKey[dict[str, tuple[int, float, float]]]()


@pytest.fixture(scope="session")
def record_deviation(pytestconfig: pytest.Config) -> Record:
    """Note how far a cell of a matrix is off, in losses and in weights."""
    worst = pytestconfig.stash.setdefault(_WORST, {})

    def record(matrix: str, losses: float, weights: float) -> None:
        cells, worst_losses, worst_weights = worst.get(matrix, (0, 0.0, 0.0))
        worst[matrix] = (cells + 1, max(worst_losses, losses), max(worst_weights, weights))

    return record


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for matrix, (cells, losses, weights) in config.stash.get(_WORST, {}).items():
        terminalreporter.write_line(
            f"{matrix}: {cells} cells, worst deviation {losses:.1e} in losses and {weights:.1e} in weights"
        )
