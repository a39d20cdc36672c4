"""Draws the plan of a problem file: `python docs/draw_plan.py PROBLEM.json PICTURE.png`."""

from __future__ import annotations

import sys
from pathlib import Path

from saturn_airflow.model.problem import Problem
from saturn_airflow.planning import solve
from saturn_airflow.tracking import chart

if __name__ == "__main__":
    problem = Problem.read(sys.argv[1])
    plan = solve(problem, time_limit=10)
    Path(sys.argv[2]).write_bytes(chart.draw(plan, "png", problem.nodes))
    print(f"makespan {plan.makespan:.0f} s, gap {100 * plan.gap:.2f}%, planned in {plan.seconds:.1f} s")
