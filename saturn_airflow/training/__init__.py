"""Running a strategy: leases, ranks, the loop, checkpoints. Imports torch, never Airflow or MLflow."""
