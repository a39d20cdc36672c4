"""Makes ``benchmarks/plan_checker.py`` importable: the checker shares no code with the planner."""

import sys
from pathlib import Path

import pytest

from saturn_airflow.planning.warming import warm

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True, scope="session")
def _compiled() -> None:
    """Time limits are for planning, not for compiling the planner."""
    warm()
