"""Makes ``benchmarks/plan_checker.py`` importable: the checker shares no code with the planner."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parent))
