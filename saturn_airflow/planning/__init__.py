"""The planner: models in Pyomo, solved by HiGHS. Imports neither torch, Airflow nor MLflow."""

from saturn_airflow.planning.planner import replan, solve

__all__ = ["replan", "solve"]
