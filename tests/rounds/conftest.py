import sys
from pathlib import Path

# The problems and the plan checker of the planner's own tests.
sys.path.append(str(Path(__file__).parents[1] / "planning"))
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
