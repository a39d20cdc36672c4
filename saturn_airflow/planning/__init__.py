"""The planner: models in Pyomo, solved by HiGHS. Imports neither torch, Airflow nor MLflow."""
