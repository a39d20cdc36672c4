"""The planner: models in Pyomo, solved by HiGHS. Imports neither torch, Airflow nor MLflow."""

from saturn_airflow.planning.planner import solve

__all__ = ["solve"]
