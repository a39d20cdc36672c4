"""Running a strategy: leases, ranks, the training loop, checkpoints. Imports torch, never Airflow or MLflow."""
